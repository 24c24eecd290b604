"""Decode attention over packed rows in chunks, in Triton: rows of more than 256 values, as those of latents, or of 192.

A row is taken in chunks of about 64 values, each of whole groups. More than 256 values and their results would not fit
in registers at once, and 192 would take the lanes of 256. Queries are rotated once by each program; the kernel that
merges shares rotates results back. On Hopper a program takes 64 rows of scores, padded or not, but for 192 values in
kv4: its products then take rows and queries from shared memory, where a row is unpacked once, and leave the registers
to the results.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.attention.decode_attention.decode_shares import (  # fmt: skip
    CHUNK_LANES,
    TYPICAL_LANES,
    DecodeProduct,
    DecodeTile,
)
from forebay.kernels.attention.decode_attention.gpu_codes import is_seen
from forebay.kernels.attention.scoring import Scoring
from forebay.kernels.gpu_support.cache_codes import per_lane, values_of_bytes
from forebay.kernels.gpu_support.cache_tiles import (  # fmt: skip
    INTERPRETED,
    AttendedCache,
    capped,
    dot,
    first_seen,
    lane_values,
    load_tile,
    round_to,
    same_rows,
    score_factors,
    unpack_ending,
)
from forebay.kernels.gpu_support.launches import KernelCall, kernel_call
from forebay.kernels.gpu_support.rotation import rotated
from forebay.kernels.products.linear.selection import AMD

CHUNK = tl.constexpr(CHUNK_LANES)
# By rows of scores: more positions would spill.
TILES = {16: DecodeTile(64, 8, 2), 32: DecodeTile(32, 8, 2), 64: DecodeTile(64, 8, 2)}
AMD_TILE = DecodeTile(32, 4, 2)


@triton.jit
def rotate_queries(row, place, used, D: tl.constexpr, POWER: tl.constexpr):
    """Store the D values of queries at pointers [M], rotated, at pointers `place` [M]."""
    for first in range(0, D, CHUNK):
        d = first + tl.arange(0, CHUNK)
        mask = used[:, None] & (d < D)[None, :]
        x = tl.load(row[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        x = round_to(rotated(x, POWER, POWER // 2), row.dtype.element_ty)
        tl.store(place[:, None] + d[None, :], x, mask=mask)
    tl.debug_barrier()


@triton.jit
def load_chunk(
    ptr, t, seen, stride_row, dtype: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, G: tl.constexpr,
    GP: tl.constexpr, EACH: tl.constexpr, LANES: tl.constexpr, INDEX: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """[T, LANES] of dtype: chunk INDEX, of EACH values, of rows of D."""
    BEFORE: tl.constexpr = INDEX * EACH
    REST: tl.constexpr = D - BEFORE
    HELD: tl.constexpr = EACH if EACH < REST else REST
    if PTX:
        GROUPS: tl.constexpr = (HELD + G - 1) // G
        ALL: tl.constexpr = (D + G - 1) // G
        PER_BYTE: tl.constexpr = 8 // BITS
        W: tl.constexpr = LANES // PER_BYTE
        row = ptr + (t.to(tl.int64) * stride_row)[:, None]
        group = tl.arange(0, LANES // GP)[None, :]
        held = seen[:, None] & (group < GROUPS)
        words = row.to(tl.pointer_type(tl.int32))
        scale, low = unpack_ending(words, group + BEFORE // G, held, ALL * G * BITS // 16, ALL)
        at, valid = lane_values(GROUPS * G // PER_BYTE, W, G // PER_BYTE, GP // PER_BYTE)
        mask = seen[:, None]
        if LANES != GROUPS * G:
            mask = mask & valid[None, :]
        code = tl.load(row + at[None, :] + BEFORE // PER_BYTE, mask=mask, other=0)
        x = values_of_bytes(code, per_lane(scale, W), per_lane(low, W), dtype, BITS)
    else:
        x = load_tile(ptr, t, seen, stride_row, dtype, BITS, HELD, LANES, G, GP, BEFORE, REST - HELD)
    return x


@triton.jit
def wide_attention_kernel(
    q_ptr, k_ptr, v_ptr, start_ptr, part_ptr, stat_ptr, qb, qh, kb, kh, kr, vb, vh, vr,
    kv_heads, group_heads, splits, window, scale_log2, softcap,
    CAPPED: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr, POWER: tl.constexpr, SAME: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, D: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Program (share, sequence and KV head, M of its query heads); strides of k and v are multiples of UNIT.

    A share's results are written as `decode_attention_kernel` writes them, after its queries in the same place. SAME:
    values are the keys.
    """
    LANES: tl.constexpr = GP if GP > CHUNK else CHUNK
    EACH: tl.constexpr = G * (LANES // GP)
    CHUNKS: tl.constexpr = (D + EACH - 1) // EACH
    split = tl.program_id(0)
    b = tl.program_id(1) // kv_heads
    kv_head = tl.program_id(1) % kv_heads
    member = tl.program_id(2) * M + tl.arange(0, M)
    present = member < group_heads
    head = kv_head * group_heads + member
    share = ((tl.program_id(1) * group_heads + member) * splits + split).to(tl.int64)
    kb, kh, kr = kb // UNIT * UNIT, kh // UNIT * UNIT, kr // UNIT * UNIT
    vb, vh, vr = vb // UNIT * UNIT, vh // UNIT * UNIT, vr // UNIT * UNIT
    length = (tl.load(start_ptr + b) + 1).to(tl.int32)
    oldest = first_seen(length - 1, window)
    first = oldest // T * T
    each = tl.cdiv(tl.cdiv(tl.maximum(length - first, 0), T), splits) * T
    begin = first + split * each
    end = tl.minimum(length, begin + each)
    total = tl.zeros((M,), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    if begin >= end:
        tl.store(stat_ptr + share * 2, top, mask=present)
        tl.store(stat_ptr + share * 2 + 1, total, mask=present)
        return

    dtype: tl.constexpr = q_ptr.dtype.element_ty
    place = part_ptr.to(tl.pointer_type(dtype)) + share * (4 * D // (dtype.primitive_bitwidth // 8))
    rotate_queries(q_ptr + b.to(tl.int64) * qb + head * qh, place, present, D, POWER)
    d, valid = lane_values(EACH, LANES, G, GP)
    q = ()
    acc = ()
    for i in tl.static_range(CHUNKS):
        mask = present[:, None] & (valid & (d + i * EACH < D))[None, :]
        q += (tl.load(place[:, None] + (d + i * EACH)[None, :], mask=mask, other=0.0),)  # type: ignore[assignment]
        acc += (tl.zeros((M, LANES), tl.float32),)  # type: ignore[assignment]
    k_ptr += b.to(tl.int64) * kb + kv_head.to(tl.int64) * kh
    v_ptr += b.to(tl.int64) * vb + kv_head.to(tl.int64) * vh
    inside = tl.arange(0, T)
    # Made before the loop, descriptors of the products' factors would take 100 registers.
    for t0 in tl.range(begin, end, T, disable_licm=True):
        t = t0 + inside
        seen = is_seen(t, oldest, end)
        s = tl.zeros((M, T), tl.float32)
        rows = ()
        for i in tl.static_range(CHUNKS):
            k = load_chunk(k_ptr, t, seen, kr, dtype, BITS, D, G, GP, EACH, LANES, i, PTX)
            rows += (k,)  # type: ignore[assignment]
            s = dot(q[i], tl.trans(k), s)
        s = capped(s * scale_log2, softcap, CAPPED)
        s = tl.where(seen[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        weights = round_to(p, dtype)
        sums = ()
        for i in tl.static_range(CHUNKS):
            v = rows[i] if SAME else load_chunk(v_ptr, t, seen, vr, dtype, BITS, D, G, GP, EACH, LANES, i, PTX)
            sums += (dot(weights, v, acc[i] * shrink[:, None]),)  # type: ignore[assignment]
        acc = sums
        top = higher
    tl.debug_barrier()  # queries are where results go
    for i in tl.static_range(CHUNKS):
        mask = present[:, None] & (valid & (d + i * EACH < D))[None, :]
        tl.store(part_ptr + share[:, None] * D + (d + i * EACH)[None, :], acc[i], mask=mask)
    tl.store(stat_ptr + share * 2, top, mask=present)
    tl.store(stat_ptr + share * 2 + 1, total, mask=present)


def wide_tile(rows: int, dim: int, bits: int, amd: bool = AMD) -> DecodeTile:
    """The tile for so many rows of scores, over rows of dim values of so many bits."""
    if amd or dim > TYPICAL_LANES:
        return AMD_TILE if amd else TILES[rows]
    # In kv8, 64 positions would spill with 16 rows of scores, and with the masks of chunks that are not full.
    few = bits == 8 and (rows == 16 or dim % CHUNK_LANES > 0)
    return DecodeTile(32 if few else 64, 4, 3)


def wide_call(
    q: Tensor, cache: AttendedCache, scoring: Scoring, product: DecodeProduct, splits: int, part: Tensor, stat: Tensor
) -> KernelCall:
    """The launch over `cache` for q [B, H, D], in `splits` shares, whose results go to part and stat."""
    view, kv_heads, group_heads = cache.view, cache.kv_heads, q.shape[1] // cache.kv_heads
    chosen = wide_tile(product.rows, view.constants["D"], view.constants["BITS"])
    scale_log2, cap = score_factors(scoring.scale, scoring.softcap)
    return kernel_call(
        wide_attention_kernel, (splits, q.shape[0] * kv_heads, triton.cdiv(group_heads, product.rows)),
        q, *view.pointers, cache.start, part, stat, q.stride(0), q.stride(1), *view.strides, kv_heads, group_heads,
        splits, scoring.window, scale_log2, cap, CAPPED=scoring.softcap > 0, BITS=view.constants["BITS"],
        UNIT=view.unit, POWER=view.power, SAME=same_rows(view), M=product.rows, T=chosen.positions,
        D=view.constants["D"], G=view.constants["G"], GP=min(view.constants["GP"], triton.next_power_of_2(
            view.constants["G"])), PTX=not INTERPRETED and not AMD, num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )  # fmt: skip
