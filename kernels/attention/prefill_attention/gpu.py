"""`forebay::attention` of many queries per sequence in Triton, by the online softmax.

A program takes ROWS rows of one KV head, a row being a pair (query, query head of that KV head), query by query: K and
V are read once for all heads of a group, and few queries still fill a tile. Only tiles of K that cross the causal edge,
or the window's, are masked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.attention.decode_attention.decode_shares import TYPICAL_LANES
from forebay.kernels.attention.scoring import Scoring
from forebay.kernels.gpu_support.arguments import before_hopper, check_device, check_tensor, fail, stages
from forebay.kernels.gpu_support.cache_tiles import (  # fmt: skip
    AttendedCache,
    CacheView,
    capped,
    check_head_dim,
    contiguous_view,
    dot,
    first_seen,
    lane_values,
    load_parts,
    multiply_keys,
    round_to,
    row_parts,
    same_rows,
    score_factors,
    sink_weight,
)
from forebay.kernels.gpu_support.launches import bound, kernel_call
from forebay.kernels.gpu_support.rotation import load_query, rotated_values
from forebay.kernels.products.linear.selection import AMD


class PrefillTile(NamedTuple):
    """Rows and positions of a tile, warps and pipeline stages."""

    rows: int
    positions: int
    num_warps: int
    num_stages: int


# By rows there are, then by bytes of a row of K once dequantized: 16 rows suit the smallest tensor-core tile, 128 two
# warp groups; D = 256 leaves room for 64 rows. fp32 takes three products for one, and their split factors registers.
FEW = {"typical": PrefillTile(16, 64, 4, 3), "wide": PrefillTile(16, 32, 4, 3)}
SOME = {"typical": PrefillTile(64, 64, 4, 3), "wide": PrefillTile(64, 32, 8, 2)}
MANY = {"typical": PrefillTile(128, 64, 8, 3), "wide": PrefillTile(64, 32, 8, 2)}
# Before Hopper, where the tiles above for more than 16 rows spill up to 72 values a thread of 255 registers.
AMPERE = {"typical": PrefillTile(64, 64, 8, 3), "wide": PrefillTile(32, 32, 8, 2)}
EXACT = {"typical": PrefillTile(32, 32, 4, 2), "wide": PrefillTile(16, 16, 4, 2)}
# Over rotated rows (few over rows of two parts, too), where the first of each kind would spill up to 70 values.
FEW_ROTATED = {"typical": PrefillTile(16, 64, 4, 2), "wide": PrefillTile(16, 32, 4, 2)}
AMPERE_ROTATED = {"typical": PrefillTile(64, 64, 8, 2), "wide": AMPERE["wide"]}
# Over rows of more than 256 values of 16 bits: latents, which are keys and values, and others.
LATENT = {"few": PrefillTile(16, 64, 8, 2), "typical": PrefillTile(64, 32, 8, 3), "ampere": PrefillTile(32, 64, 8, 2)}
AMD_LATENT = {"few": PrefillTile(16, 32, 4, 2), "ampere": PrefillTile(32, 16, 4, 2)}  # eight warps would spill 775
WIDEST = {"few": PrefillTile(16, 32, 8, 2), "typical": PrefillTile(64, 16, 8, 3), "ampere": PrefillTile(32, 32, 8, 2)}
EXACT_ROTATED = {"typical": PrefillTile(16, 32, 4, 2), "wide": PrefillTile(16, 16, 4, 2)}


WIDE = tl.constexpr(TYPICAL_LANES)


@triton.jit
def loaded(t, end, since, MASKED: tl.constexpr, WINDOWED: tl.constexpr, BITS: tl.constexpr):
    """Positions t of a tile that are loaded, those before `end` and from `since` on; None: all."""
    if not MASKED and BITS == 0:
        seen = None
    else:
        seen = t < end
        if WINDOWED:
            seen = seen & (t >= since)
    return seen


@triton.jit
def tile_scores(
    q, q2, k_ptr, begin, end, since, kr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, BITS: tl.constexpr,
    T: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    D2: tl.constexpr, DP2: tl.constexpr,
):  # fmt: skip
    """q times K of positions begin .. begin + T - 1, in fp32, and K by part; unless MASKED all are before `end`."""
    t = begin + tl.arange(0, T)
    seen = loaded(t, end, since, MASKED, WINDOWED, BITS)
    k, k2 = load_parts(k_ptr, t, seen, kr, q.dtype, BITS, D, DP, G, GP, D2, DP2)
    return multiply_keys(q, q2, k, k2, D2), k, k2


@triton.jit
def attend(
    acc, acc2, total, top, s, q, q2, k_ptr, v_ptr, position, oldest, since, begin, end, last, kr, vr,
    scale_log2, softcap,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, BITS: tl.constexpr,
    SAME: tl.constexpr, LATE: tl.constexpr, AHEAD: tl.constexpr,
    T: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    D2: tl.constexpr, DP2: tl.constexpr, DV2: tl.constexpr,
):  # fmt: skip
    """The online softmax's state after positions begin .. end - 1; unless MASKED every row sees all of them. What is
    before `since`, which no row sees, need not be there: a factor of 0 would not take NaN away. `last` ends what is
    loaded. SAME: values are the keys.

    LATE: the scale is applied with the subtraction of the maximum, as one instruction. AHEAD: s holds the products of
    the tile at `begin`; those of the next tile are multiplied during the softmax, and returned. Unless MASKED, a tile
    at `end` must then be whole.
    """
    for t0 in range(begin, end, T):
        t = t0 + tl.arange(0, T)
        if AHEAD:
            following, k, k2 = tile_scores(
                q, q2, k_ptr, t0 + T, last, since, kr, MASKED, WINDOWED, BITS, T, D, DP, G, GP, D2, DP2,
            )  # fmt: skip
        else:
            s, k, k2 = tile_scores(q, q2, k_ptr, t0, last, since, kr, MASKED, WINDOWED, BITS, T, D, DP, G, GP, D2, DP2)
            following = s
        if not LATE:
            s = capped(s * scale_log2, softcap, CAPPED)
        if MASKED:
            seen = t[None, :] <= position[:, None]
            if WINDOWED:
                seen = seen & (t[None, :] >= oldest[:, None])
            s = tl.where(seen, s, float("-inf"))
        factor = scale_log2 if LATE else 1.0
        higher = tl.maximum(top, tl.max(s, 1) * factor)
        base = tl.maximum(higher, -3.0e38)  # also where no score is above -inf
        p = tl.exp2(s * factor - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        if SAME:
            v, v2 = k, k2
        else:
            held = loaded(t, last, since, MASKED, WINDOWED, BITS)
            v, v2 = load_parts(v_ptr, t, held, vr, q.dtype, BITS, D, DP, G, GP, DV2, DP2)
        weights = round_to(p, q.dtype)
        acc = dot(weights, v, acc * shrink[:, None])
        if DV2 != 0:
            acc2 = dot(weights, v2, acc2 * shrink[:, None])
        top = higher
        s = following
    return acc, acc2, total, top, s


@triton.jit
def prefill_attention_kernel(
    q_ptr, k_ptr, v_ptr, start_ptr, sinks_ptr, out_ptr, qb, qh, qs, kb, kh, kr, vb, vh, vr, ob, os, oh,
    queries, kv_heads, group_heads, window, scale_log2, softcap,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr,
    BITS: tl.constexpr, UNIT: tl.constexpr, POWER: tl.constexpr,
    SAME: tl.constexpr, LATE: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    D2: tl.constexpr, DP2: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, last first as it is the longest; sequence and KV head).

    Strides of k and v are multiples of UNIT. SAME, LATE and AHEAD as in `attend`; with POWER there
    is no AHEAD.
    D2 of a row's values, 0 for none, follow the first D as a part of its own, in DP2 lanes.
    DV: values of a row of V, no more than of K; what a wider tile reads after them meets no result.
    """
    DV2: tl.constexpr = DV - D if DV > D else 0
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    b = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    row = first_row + tl.arange(0, ROWS)
    present = row < queries * group_heads
    query = row // group_heads
    head = kv_head * group_heads + row % group_heads
    kb, kh, kr = kb // UNIT * UNIT, kh // UNIT * UNIT, kr // UNIT * UNIT
    vb, vh, vr = vb // UNIT * UNIT, vh // UNIT * UNIT, vr // UNIT * UNIT
    q_at = b * qb + query.to(tl.int64) * qs + head * qh
    q = load_query(q_ptr + q_at, present, D, DP, G, GP, POWER)
    q2 = q
    acc2 = 0.0
    if D2 != 0:
        q2 = load_query(q_ptr + q_at + D, present, D2, DP2, D2, DP2, 0)
    if DV2 != 0:
        acc2 = tl.zeros((ROWS, DP2), tl.float32)
    k_ptr += b * kb + kv_head * kh
    v_ptr += b * vb + kv_head * vh

    start = tl.load(start_ptr + b).to(tl.int32)
    position = start + query
    low = start + first_row // group_heads  # positions of the first and of the last row
    high = start + (tl.minimum(first_row + ROWS, queries * group_heads) - 1) // group_heads
    begin = 0
    since = 0
    plain_begin = 0
    oldest = position
    if WINDOWED:
        oldest = first_seen(position, window)
        since = first_seen(low, window)
        begin = since // T * T
        plain_begin = tl.maximum(begin, tl.cdiv(first_seen(high, window), T) * T)
    # Where products are made ahead, the last whole tile is left to the loop that masks: the one after may not be whole.
    plain_end = tl.maximum(plain_begin, (low + 1) // T * T - (T if AHEAD else 0))
    acc = tl.zeros((ROWS, DP), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    s = tl.zeros((ROWS, T), tl.float32)
    if AHEAD:
        s, _, _ = tile_scores(q, q2, k_ptr, begin, high + 1, since, kr, True, WINDOWED, BITS, T, D, DP, G, GP, D2, DP2)
    if POWER == 0 and DP <= WIDE:
        if WINDOWED:
            acc, acc2, total, top, s = attend(
                acc, acc2, total, top, s, q, q2, k_ptr, v_ptr, position, oldest, since, begin,
                tl.minimum(plain_begin, high + 1), high + 1, kr, vr,
                scale_log2, softcap, True, WINDOWED, CAPPED, BITS, SAME, LATE, AHEAD, T, D, DP, G, GP, D2, DP2, DV2,
            )  # fmt: skip
        acc, acc2, total, top, s = attend(
            acc, acc2, total, top, s, q, q2, k_ptr, v_ptr, position, oldest, since,
            plain_begin, plain_end, high + 1, kr, vr,
            scale_log2, softcap, False, WINDOWED, CAPPED, BITS, SAME, LATE, AHEAD, T, D, DP, G, GP, D2, DP2, DV2,
        )  # fmt: skip
    else:  # one loop: queries that are rotated or wide and that two loops read would stay in registers, and spill
        plain_end = begin
    acc, acc2, total, top, s = attend(
        acc, acc2, total, top, s, q, q2, k_ptr, v_ptr, position, oldest, since, plain_end, high + 1, high + 1, kr, vr,
        scale_log2, softcap, True, WINDOWED, CAPPED, BITS, SAME, LATE, AHEAD, T, D, DP, G, GP, D2, DP2, DV2,
    )  # fmt: skip
    if HAS_SINKS:
        total += sink_weight(sinks_ptr + head, present, top)
    out, d, valid = rotated_values(acc / total[:, None], D, DP, G, GP, POWER)
    out = round_to(out, out_ptr.dtype.element_ty)
    if DP > WIDE:
        # From the tile's end, as another value to the compiler: over the loop, addresses of these rows would spill.
        row = first_row + ROWS - (ROWS - tl.arange(0, ROWS))
        present = row < queries * group_heads
        query = row // group_heads
        head = kv_head * group_heads + row % group_heads
    out_at = b * ob + query.to(tl.int64) * os + head * oh
    if DV < D:
        valid = valid & (d < DV)
    tl.store(out_ptr + out_at[:, None] + d[None, :], out, mask=present[:, None] & valid[None, :])
    if DV2 != 0:
        d, valid = lane_values(DV2, DP2, DV2, DP2)
        out = round_to(acc2 / total[:, None], out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_at[:, None] + (D + d)[None, :], out, mask=present[:, None] & valid[None, :])


def tile(
    rows: int, lanes: int, itemsize: int, ampere: bool = False, rotated: bool = False, parts: int = 1,
    same: bool = False, amd: bool = AMD,
) -> PrefillTile:  # fmt: skip
    """The tile for so many rows, of K rows in 1 or 2 parts: so many lanes of itemsize bytes once dequantized.

    `same`: values are the keys."""
    if lanes > TYPICAL_LANES:
        tiles = WIDEST if not same else AMD_LATENT if amd else LATENT
        return tiles["few" if rows <= 16 else "ampere" if ampere or amd else "typical"]
    size = "wide" if lanes > (64 if itemsize == 4 else 128) else "typical"
    if itemsize == 4:
        return (EXACT_ROTATED if rotated else EXACT)[size]
    if rows <= 16:
        return (FEW_ROTATED if rotated or parts == 2 else FEW)[size]
    if ampere:
        return (AMPERE_ROTATED if rotated else AMPERE)[size]
    return (SOME if rows <= 512 else MANY)[size]


def least_lanes(rows: int, itemsize: int) -> int:
    """Lanes of a row's second part, at least: the four warps of a tile of few rows, or of fp32, share 32."""
    return 32 if rows <= 16 or itemsize == 4 else 16


def loop_order(scoring: Scoring, view: CacheView, chosen: PrefillTile) -> dict[str, bool]:
    """The constants LATE and AHEAD of `attend`. Only in tiles of two warp groups does the compiler put the products of
    the next tile among the instructions of the softmax; over packed rows both would spill."""
    native = view.constants["BITS"] == 0
    long = chosen.rows == MANY["typical"].rows
    return {"LATE": native and scoring.scale > 0 >= scoring.softcap, "AHEAD": native and long}


def bind_view(
    q: Tensor, cache: AttendedCache, scoring: Scoring, out: Tensor, sinks: Tensor | None = None
) -> Callable[[], None]:
    """A call that fills out [B, S, H, D] from q and a view of the cache, of arguments that have been checked. Values
    may have fewer numbers than keys: as many as out."""
    view, kv_heads = cache.view, cache.kv_heads
    batch, heads, queries, _ = q.shape
    if q.numel() == 0:
        return lambda: None
    group_heads = heads // kv_heads
    rows = queries * group_heads
    itemsize, rotated = q.dtype.itemsize, view.power > 0
    row = row_parts(view, least_lanes(rows, itemsize))
    same, lanes = same_rows(view), view.constants["DP"]
    chosen = tile(rows, lanes, itemsize, before_hopper(q.device), rotated, 2 if row["D2"] else 1, same)
    scale_log2, cap = score_factors(scoring.scale, scoring.softcap)
    return bound(kernel_call(
        prefill_attention_kernel, (triton.cdiv(rows, chosen.rows), batch * kv_heads),
        q, *view.pointers, cache.start, q if sinks is None else sinks, out, *q.stride()[:3], *view.strides,
        *out.stride()[:3], queries, kv_heads, group_heads, scoring.window, scale_log2, cap,
        WINDOWED=scoring.window != 0, CAPPED=scoring.softcap > 0, HAS_SINKS=sinks is not None,
        UNIT=view.unit, POWER=view.power, SAME=same, ROWS=chosen.rows, T=chosen.positions,
        BITS=view.constants["BITS"], DV=out.shape[3], **row, **loop_order(scoring, view, chosen),
        num_warps=chosen.num_warps, num_stages=stages(chosen.num_stages),
    ))  # fmt: skip


def _check(op: str, q: Tensor, start: Tensor, kv_heads: int, out: Tensor) -> None:
    if q.dim() != 4:
        fail(op, "q", f"must be [B, H, S, D], got shape {tuple(q.shape)}")
    check_tensor(op, "q", q)
    batch, heads, queries, dim = q.shape
    if kv_heads < 1 or heads % kv_heads:
        fail(op, "kv_heads", f"must divide q's {heads} heads, got {kv_heads}")
    check_head_dim(op, q)
    check_device(op, "start", start, q.device)
    check_tensor(op, "start", start, dtype=torch.int64, shape=(batch,))
    check_tensor(op, "out", out, device=q.device, dtype=q.dtype, shape=(batch, queries, heads, dim))


def bind_prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, scoring: Scoring, out: Tensor, sinks: Tensor | None = None
) -> Callable[[], None]:
    """prefill_attention as a call without arguments, on the tensors' contents at each call; checks are made here."""
    op = "prefill_attention"
    if k.dim() != 4:
        fail(op, "k", f"must be [B, Hkv, L, D], got shape {tuple(k.shape)}")
    _check(op, q, start, k.shape[1], out)
    wanted = (q.shape[0], k.shape[1], k.shape[2], q.shape[3])
    for tensor, name in ((k, "k"), (v, "v")):
        check_tensor(op, name, tensor, device=q.device, dtype=q.dtype, shape=wanted)
    if sinks is not None:
        check_tensor(op, "sinks", sinks, device=q.device, dtype=q.dtype, shape=q.shape[1:2])
    cache = AttendedCache(contiguous_view(k, v), k.shape[1], k.shape[2], 2 * q.shape[3] * q.dtype.itemsize, start)
    return bind_view(q, cache, scoring, out, sinks)
