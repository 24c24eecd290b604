"""`forebay::attention` of one query per sequence in Triton, the sequence split over programs.

A program takes all query heads of a KV head (padded to 16 rows for the tensor cores) and one share of the positions, so
K and V are read once. With a unified maximum (FlashDecoding++Next, section III) every share uses exp(x - phi): the loop
holds no reduction over a row and no rescaling of the accumulator, only element-wise maxima and sums that are reduced
once at the end. A share whose largest score x of a row leaves phi + low < x < phi + high is computed again for that
row, in the same program, by the synchronised online softmax; shares carry the maximum they used, so the merge is exact
for both kinds. Below, the largest score decides rather than each score: a term far below the largest adds nothing.

Loops over values are in `gpu_values`; over rows whose codes the tensor cores take as they are, in `gpu_codes`. Packed
rows of more than 256 values, or of three chunks of 64 lanes, have a kernel of their own, `gpu_wide`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.attention.decode_attention import decode_shares
from forebay.kernels.attention.decode_attention.decode_shares import (
    TYPICAL_LANES,
    DecodeProduct,
    DecodeShape,
    DecodeTile,
    processor_count,
    share_count,
    tile,
)
from forebay.kernels.attention.decode_attention.gpu_codes import synchronised_codes, unified_codes
from forebay.kernels.attention.decode_attention.gpu_merge import MERGED, merge_kernel, merge_shares
from forebay.kernels.attention.decode_attention.gpu_values import synchronised_share, unified_share
from forebay.kernels.attention.decode_attention.gpu_wide import wide_call
from forebay.kernels.attention.scoring import SYNCHRONISED, Scoring, SoftmaxRange
from forebay.kernels.gpu_support.arguments import before_hopper, check_device, check_tensor, fail
from forebay.kernels.gpu_support.cache_tiles import (  # fmt: skip
    INTERPRETED,
    LOG2E,
    AttendedCache,
    CacheView,
    check_head_dim,
    contiguous_view,
    first_seen,
    lane_values,
    row_parts,
    same_rows,
    score_factors,
)
from forebay.kernels.gpu_support.launches import ALIGN, KernelCall, bound_with_scratch, kernel_call
from forebay.kernels.gpu_support.rotation import load_query
from forebay.kernels.products.linear.selection import AMD


@triton.jit
def share_of(row, splits, split):
    """The place of a share of rows. It is made where it is used: over a loop, addresses of many rows would spill."""
    return (row * splits + split).to(tl.int64)


@triton.jit
def store_share(
    part_ptr, stat_ptr, share, acc, acc2, total, top, keep, d, valid,
    D: tl.constexpr, D2: tl.constexpr, DP2: tl.constexpr,
):  # fmt: skip
    """Write rows `keep` of a share: acc, then acc2, at part [share, D + D2], (maximum used, sum) at stat [share, 2]."""
    at = part_ptr + share[:, None] * (D + D2)
    tl.store(at + d[None, :], acc, mask=keep[:, None] & valid[None, :])
    if D2 != 0:
        d2 = tl.arange(0, DP2)[None, :]
        tl.store(at + (D + d2), acc2, mask=keep[:, None] & (d2 < D2))
    tl.store(stat_ptr + share * 2, top, mask=keep)
    tl.store(stat_ptr + share * 2 + 1, total, mask=keep)


@triton.jit
def decode_attention_kernel(
    q_ptr, k_ptr, v_ptr, start_ptr, sinks_ptr, counter_ptr, part_ptr, stat_ptr, out_ptr,
    qb, qh, kb, kh, kr, vb, vh, vr, ob, oh, kv_heads, group_heads, splits, window, scale_log2, softcap, phi, low, high,
    MERGE: tl.constexpr, UNIFIED: tl.constexpr, CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr, BITS: tl.constexpr,
    UNIT: tl.constexpr, POWER: tl.constexpr, FOLDED: tl.constexpr, PTX: tl.constexpr,
    SAME: tl.constexpr, M: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D2: tl.constexpr, DP2: tl.constexpr,
):  # fmt: skip
    """Program (share, sequence and KV head, H of its query heads); strides of k and v are multiples of UNIT.

    With MERGE the last program of a sequence and heads to arrive puts the shares together into out (without positions:
    zeros); counter_ptr has a counter for each such group of programs, 0 before and after a launch. Rows of two parts,
    D2 of whose values follow the first D, are not put together here. SAME: values are the keys.
    """
    split = tl.program_id(0)
    b = tl.program_id(1) // kv_heads
    kv_head = tl.program_id(1) % kv_heads
    R: tl.constexpr = 8 if H < 8 else H
    place = tl.arange(0, R)
    member = tl.program_id(2) * H + place
    present = (place < H) & (member < group_heads)
    head = kv_head * group_heads + member
    d, valid = lane_values(D, DP, G, GP)
    kb, kh, kr = kb // UNIT * UNIT, kh // UNIT * UNIT, kr // UNIT * UNIT
    vb, vh, vr = vb // UNIT * UNIT, vh // UNIT * UNIT, vr // UNIT * UNIT

    length = (tl.load(start_ptr + b) + 1).to(tl.int32)
    oldest = first_seen(length - 1, window)
    first = oldest // T * T
    each = tl.cdiv(tl.cdiv(tl.maximum(length - first, 0), T), splits) * T
    begin = first + split * each
    end = tl.minimum(length, begin + each)
    out_at = out_ptr + b.to(tl.int64) * ob + head * oh
    if begin >= end:
        nothing = tl.zeros((R,), tl.float32)
        if MERGE:
            zeros = tl.broadcast_to(nothing[:, None], (R, DP)).to(out_ptr.dtype.element_ty)
            tl.store(out_at[:, None] + d[None, :], zeros, mask=(present & (split == 0))[:, None] & valid[None, :])
        else:
            share = share_of(b * kv_heads * group_heads + head, splits, split)
            tl.store(stat_ptr + share * 2, nothing + float("-inf"), mask=present)
            tl.store(stat_ptr + share * 2 + 1, nothing, mask=present)
        return

    asked = tl.program_id(2) * H + tl.arange(0, M) % H
    q_at = b.to(tl.int64) * qb + (kv_head * group_heads + asked) * qh
    q = load_query(q_ptr + q_at, asked < group_heads, D, DP, G, GP, POWER)
    q2 = q
    if D2 != 0:
        q2 = load_query(q_ptr + q_at + D, asked < group_heads, D2, DP2, D2, DP2, 0)
    if FOLDED and POWER != 0:
        # Rotated queries would be read from shared memory for every tile. By way of the share's place in memory they
        # come to the registers of the product's factor as queries do that are loaded.
        asked_share = ((b * kv_heads + kv_head) * group_heads + asked) * splits + split
        at = part_ptr + asked_share.to(tl.int64)[:, None] * D + d[None, :]
        mask = (asked < group_heads)[:, None] & valid[None, :]
        tl.store(at, q.to(tl.float32), mask=mask)
        tl.debug_barrier()
        q = tl.load(at, mask=mask, other=0.0).to(q.dtype)
    k_ptr += b.to(tl.int64) * kb + kv_head.to(tl.int64) * kh
    v_ptr += b.to(tl.int64) * vb + kv_head.to(tl.int64) * vh

    redo = present
    if UNIFIED:
        if FOLDED:
            acc2 = 0.0
            acc, total, top = unified_codes(
                q, k_ptr, v_ptr, begin, end, oldest, kr, vr, scale_log2, softcap, phi,
                CAPPED, BITS, H, T, D, DP, G, GP, UNIT, PTX,
            )  # fmt: skip
        else:
            acc, acc2, total, top = unified_share(
                q, q2, k_ptr, v_ptr, begin, end, oldest, kr, vr, scale_log2, softcap, phi,
                CAPPED, BITS, SAME, M, T, D, DP, G, GP, D2, DP2,
            )  # fmt: skip
        # Written so that a row whose maximum is NaN is computed again.
        inside = (top > phi + low) & (top < phi + high)
        used = tl.zeros_like(top) + phi
        share = share_of(b * kv_heads * group_heads + head, splits, split)
        store_share(part_ptr, stat_ptr, share, acc, acc2, total, used, present & inside, d, valid, D, D2, DP2)
        redo = present & (inside == 0)
    if tl.max(redo.to(tl.int32), 0) > 0:
        if FOLDED:
            acc2 = 0.0
            acc, total, top = synchronised_codes(
                q, k_ptr, v_ptr, begin, end, oldest, kr, vr, scale_log2, softcap,
                CAPPED, BITS, H, T, D, DP, G, GP, UNIT, PTX,
            )  # fmt: skip
        else:
            acc, acc2, total, top = synchronised_share(
                q, q2, k_ptr, v_ptr, begin, end, oldest, kr, vr, scale_log2, softcap,
                CAPPED, BITS, SAME, M, T, D, DP, G, GP, D2, DP2,
            )  # fmt: skip
        share = share_of(b * kv_heads * group_heads + head, splits, split)
        store_share(part_ptr, stat_ptr, share, acc, acc2, total, top, redo, d, valid, D, D2, DP2)
    if MERGE:
        tl.debug_barrier()  # every thread's part is written before the one atomic that publishes it
        shares = tl.cdiv(length - first, each)
        counter = counter_ptr + tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if arrived == shares - 1:
            tl.store(counter, 0)
            element: tl.constexpr = out_ptr.dtype.element_ty
            share = share_of(b * kv_heads * group_heads + head, splits, 0)
            merge_shares(
                part_ptr, stat_ptr, out_at, sinks_ptr + head, share, shares, present, element, D, R, POWER, HAS_SINKS,
            )  # fmt: skip


def choose(
    view: CacheView, itemsize: int, group_heads: int, amd: bool = AMD, hopper: bool = True
) -> tuple[DecodeTile, DecodeProduct, dict[str, Any]]:
    """(tile, product, constants of both and of a row) for queries of itemsize bytes over a view."""
    dim, lanes, group, bits = (view.constants[name] for name in ("D", "DP", "G", "BITS"))
    product = decode_shares.product(dim, group, bits, itemsize, group_heads, amd, hopper)
    # Codes are read as words, and from 64 rows at offsets that 32 bits hold.
    if product.folded and (view.unit % 4 or max(view.strides[2], view.strides[5]) >= 1 << 27):
        product = decode_shares.product(dim, group, 0, itemsize, group_heads)
    chosen = tile(lanes, itemsize, bits, product.folded)
    same = same_rows(view)
    if same:
        many = "many" if product.rows == 64 else "few"
        chosen = decode_shares.AMD_LATENT[product.rows] if amd else decode_shares.LATENT[many]
    row = row_parts(view, 16 if dim > TYPICAL_LANES else lanes, amd) | {"SAME": same, "BITS": bits}
    tiles = {"FOLDED": product.folded, "M": product.rows, "H": product.heads, "T": chosen.positions}
    return chosen, product, row | tiles


def register_limit(view: CacheView, folded: bool, bf16: bool) -> dict[str, int]:
    """The compiler's option that keeps three programs of 4-bit rows on a multiprocessor: 65536 / (3 * 128) registers;
    or one of rows of more than 256 values, where by itself it would spill some to have two.

    Triton 3.6 and 3.9 take up to 226 by themselves, without need; fp16 would spill with 3.6.
    """
    few = folded and bf16 and not AMD and view.constants["BITS"] == 4 and view.constants["D"] == 128
    wide = view.constants["D"] > TYPICAL_LANES and not AMD
    return {"maxnreg": 168 if few else 255} if few or wide else {}


def bind_view(
    q: Tensor, cache: AttendedCache, scoring: Scoring, softmax: SoftmaxRange, splits: int | None, out: Tensor,
    sinks: Tensor | None = None,
) -> Callable[[], None]:  # fmt: skip
    """A call that fills out [B, H, D] from q and a view of the cache, of arguments that have been checked."""
    view, kv_heads, capacity, position_nbytes, start = cache
    phi, low, high = softmax
    batch, heads, dim = q.shape
    if q.numel() == 0:
        return lambda: None
    group_heads = heads // kv_heads
    chosen, product, constants = choose(view, q.dtype.itemsize, group_heads, hopper=not before_hopper(q.device))
    if splits is None:
        sizes = group_heads, dim, view.constants["DP"], q.dtype.itemsize, view.constants["BITS"]
        shape = DecodeShape(batch * kv_heads, capacity, position_nbytes, *sizes)
        splits = share_count(shape, product, processor_count(q.device))
    merged = splits <= MERGED and dim <= TYPICAL_LANES and not product.wide
    scale_log2, cap = score_factors(scoring.scale, scoring.softcap)
    limit = register_limit(view, product.folded, q.dtype == torch.bfloat16)
    shares = batch * heads * splits
    part_end = 4 * shares * dim
    given_sinks = q if sinks is None else sinks
    stat_at = -(-part_end // ALIGN) * ALIGN

    def launches(scratch: Tensor, counters: Tensor) -> list[KernelCall]:
        part, stat = scratch[:part_end].view(torch.float32), scratch[stat_at:].view(torch.float32)
        made = [wide_call(q, cache, scoring, product, splits, part, stat) if product.wide else kernel_call(
            decode_attention_kernel, (splits, batch * kv_heads, triton.cdiv(group_heads, product.heads)),
            q, *view.pointers, start, given_sinks, counters, part, stat, out, q.stride(0), q.stride(1), *view.strides,
            out.stride(0), out.stride(1), kv_heads, group_heads, splits, scoring.window, scale_log2, cap,
            phi * LOG2E, low * LOG2E, high * LOG2E, MERGE=merged, UNIFIED=high > low and dim <= TYPICAL_LANES,
            CAPPED=scoring.softcap > 0, HAS_SINKS=sinks is not None, UNIT=view.unit, POWER=view.power,
            PTX=not INTERPRETED, **constants, num_warps=chosen.num_warps, num_stages=chosen.num_stages, **limit,
        )]  # fmt: skip
        if not merged:
            made.append(kernel_call(
                merge_kernel, (batch * heads,),
                part, stat, start, given_sinks, out, out.stride(0), out.stride(1), heads, splits,
                D=dim, DP=triton.next_power_of_2(dim), SHARES=MERGED, POWER=view.power, HAS_SINKS=sinks is not None,
                num_warps=4 if dim <= TYPICAL_LANES else 8,
            ))  # fmt: skip
        return made

    counters = decode_shares.counters_nbytes(batch, heads) // 4
    return bound_with_scratch(q.device, stat_at + 8 * shares, counters, launches)


def _check(op: str, q: Tensor, start: Tensor, kv_heads: int, out: Tensor) -> None:
    if q.dim() != 3:
        fail(op, "q", f"must be [B, H, D], got shape {tuple(q.shape)}")
    check_tensor(op, "q", q)
    if kv_heads < 1 or q.shape[1] % kv_heads:
        fail(op, "kv_heads", f"must divide q's {q.shape[1]} heads, got {kv_heads}")
    check_head_dim(op, q)
    check_device(op, "start", start, q.device)
    check_tensor(op, "start", start, dtype=torch.int64, shape=(q.shape[0],))
    check_tensor(op, "out", out, device=q.device, dtype=q.dtype, shape=q.shape)


def bind_decode_attention_contiguous(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, scoring: Scoring, out: Tensor,
    softmax: SoftmaxRange = SYNCHRONISED, splits: int | None = None, sinks: Tensor | None = None,
) -> Callable[[], None]:  # fmt: skip
    """decode_attention_contiguous as a call without arguments, on the tensors' contents then; checks are made here."""
    op = "attention"
    if k.dim() != 4:
        fail(op, "k", f"must be [B, Hkv, L, D], got shape {tuple(k.shape)}")
    _check(op, q, start, k.shape[1], out)
    wanted = (q.shape[0], k.shape[1], k.shape[2], q.shape[2])
    for tensor, name in ((k, "k"), (v, "v")):
        check_tensor(op, name, tensor, device=q.device, dtype=q.dtype, shape=wanted)
    if sinks is not None:
        check_tensor(op, "sinks", sinks, device=q.device, dtype=q.dtype, shape=q.shape[1:2])
    cache = AttendedCache(contiguous_view(k, v), k.shape[1], k.shape[2], 2 * q.shape[2] * q.dtype.itemsize, start)
    return bind_view(q, cache, scoring, softmax, splits, out, sinks)
