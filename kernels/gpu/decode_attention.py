"""`forebay::decode_attention` in Triton: one query per sequence over its cache, the sequence split over programs.

A program takes all query heads of a KV head (padded to 16 rows for the tensor cores) and one share of the positions, so
K and V are read once. With a unified maximum (FlashDecoding++Next, section III) every share uses exp(x - phi): the loop
holds no reduction over a row and no rescaling of the accumulator, only element-wise maxima and sums that are reduced
once at the end. A share whose largest score x of a row leaves phi + low < x < phi + high is computed again for that
row, in the same program, by the synchronised online softmax; shares carry the maximum they used, so the merge is exact
for both kinds. Below, the largest score decides rather than each score: a term far below the largest adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.gpu.arguments import check_device, check_tensor, fail
from forebay.kernels.gpu.audit_case import AuditCase
from forebay.kernels.gpu.decode_shares import PROCESSORS, part_nbytes, processor_count, split_count, tile
from forebay.kernels.gpu.paged import (
    LOG2E,
    CacheView,
    contiguous_view,
    dot,
    find_block,
    lane_values,
    load_tile,
    paged_view,
    place_in_block,
    round_to,
    score_factors,
    score_log2,
)  # fmt: skip
from forebay.kernels.gpu.rotation import load_query, rotated
from forebay.kernels.paged import BlockLayout, check_pool, check_table

MERGED = 16  # shares that the merge takes at a time


@triton.jit
def unified_share(
    q, k_ptr, v_ptr, k_pairs_ptr, v_pairs_ptr, table_ptr, begin, end, oldest,
    kb, kr, vb, vr, pb, scale_log2, softcap, phi,
    CAPPED: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """(sum of exp2(x - phi) V [M, DP], sum of exp2(x - phi) [M], largest x [M]) from position begin on."""
    acc = tl.zeros((M, DP), tl.float32)
    total = tl.zeros((M, T), tl.float32)
    top = tl.full((M, T), float("-inf"), tl.float32)
    block = find_block(table_ptr, begin, end, TOKENS, T)
    for t0 in range(begin, end, T):
        t = t0 + tl.arange(0, T)
        seen = (t >= oldest) & (t < end)
        inside = place_in_block(t, TOKENS)
        block_after = find_block(table_ptr, t0 + T, end, TOKENS, T)
        k = load_tile(k_ptr, k_pairs_ptr, block, inside, seen, kb, kr, pb, q.dtype, BITS, D, DP, G, GP)
        s = tl.where(seen[None, :], score_log2(q, k, scale_log2, softcap, CAPPED), float("-inf"))
        top = tl.maximum(top, s)
        p = tl.exp2(s - phi)
        total += p
        v = load_tile(v_ptr, v_pairs_ptr, block, inside, seen, vb, vr, pb, q.dtype, BITS, D, DP, G, GP)
        acc = dot(round_to(p, q.dtype), v, acc)
        block = block_after
    return acc, tl.sum(total, 1), tl.max(top, 1)


@triton.jit
def synchronised_share(
    q, k_ptr, v_ptr, k_pairs_ptr, v_pairs_ptr, table_ptr, begin, end, oldest,
    kb, kr, vb, vr, pb, scale_log2, softcap,
    CAPPED: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """As unified_share, with the largest x so far in place of phi, by the online softmax."""
    acc = tl.zeros((M, DP), tl.float32)
    total = tl.zeros((M,), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    block = find_block(table_ptr, begin, end, TOKENS, T)
    for t0 in range(begin, end, T):
        t = t0 + tl.arange(0, T)
        seen = (t >= oldest) & (t < end)
        inside = place_in_block(t, TOKENS)
        block_after = find_block(table_ptr, t0 + T, end, TOKENS, T)
        k = load_tile(k_ptr, k_pairs_ptr, block, inside, seen, kb, kr, pb, q.dtype, BITS, D, DP, G, GP)
        s = tl.where(seen[None, :], score_log2(q, k, scale_log2, softcap, CAPPED), float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        v = load_tile(v_ptr, v_pairs_ptr, block, inside, seen, vb, vr, pb, q.dtype, BITS, D, DP, G, GP)
        acc = dot(round_to(p, q.dtype), v, acc * shrink[:, None])
        top = higher
        block = block_after
    return acc, total, top


@triton.jit
def store_share(part_ptr, stat_ptr, share, acc, total, top, keep, d, valid, D: tl.constexpr):
    """Write rows `keep` of a share: acc at part [share, D], (maximum used, sum) at stat [share, 2]."""
    tl.store(part_ptr + share[:, None] * D + d[None, :], acc, mask=keep[:, None] & valid[None, :])
    tl.store(stat_ptr + share * 2, top, mask=keep)
    tl.store(stat_ptr + share * 2 + 1, total, mask=keep)


@triton.jit
def decode_attention_kernel(
    q_ptr, k_ptr, v_ptr, k_pairs_ptr, v_pairs_ptr, table_ptr, length_ptr, part_ptr, stat_ptr,
    qb, qh, kb, kh, kr, vb, vh, vr, pb, ph, table_stride,
    length_more, kv_heads, group_heads, splits, window, scale_log2, softcap, phi, low, high,
    UNIFIED: tl.constexpr, CAPPED: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr,
    UNIT: tl.constexpr, POWER: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Program (share, sequence and KV head, M of its query heads); strides of k and v are multiples of UNIT."""
    split = tl.program_id(0)
    b = tl.program_id(1) // kv_heads
    kv_head = tl.program_id(1) % kv_heads
    member = tl.program_id(2) * M + tl.arange(0, M)
    present = member < group_heads
    head = kv_head * group_heads + member
    d, valid = lane_values(D, DP, G, GP)
    kb, kh, kr = kb // UNIT * UNIT, kh // UNIT * UNIT, kr // UNIT * UNIT
    vb, vh, vr = vb // UNIT * UNIT, vh // UNIT * UNIT, vr // UNIT * UNIT
    share = ((b * kv_heads * group_heads + head) * splits + split).to(tl.int64)

    length = (tl.load(length_ptr + b) + length_more).to(tl.int32)
    oldest = 0
    if window > 0:
        oldest = tl.maximum(0, length - window)
    first = oldest // T * T
    each = tl.cdiv(tl.cdiv(tl.maximum(length - first, 0), T), splits) * T
    begin = first + split * each
    end = tl.minimum(length, begin + each)
    if begin >= end:
        nothing = tl.zeros((M,), tl.float32)
        tl.store(stat_ptr + share * 2, nothing + float("-inf"), mask=present)
        tl.store(stat_ptr + share * 2 + 1, nothing, mask=present)
        return

    q_at = b.to(tl.int64) * qb + head * qh
    q = load_query(q_ptr + q_at, present, D, DP, G, GP, POWER)
    k_ptr += kv_head.to(tl.int64) * kh
    v_ptr += kv_head.to(tl.int64) * vh
    if TOKENS == 0:
        k_ptr += b.to(tl.int64) * kb
        v_ptr += b.to(tl.int64) * vb
    else:
        table_ptr += b.to(tl.int64) * table_stride
    if k_pairs_ptr is not None:
        k_pairs_ptr += kv_head.to(tl.int64) * ph
        v_pairs_ptr += kv_head.to(tl.int64) * ph

    redo = present
    if UNIFIED:
        acc, total, top = unified_share(
            q, k_ptr, v_ptr, k_pairs_ptr, v_pairs_ptr, table_ptr, begin, end, oldest, kb, kr, vb, vr, pb,
            scale_log2, softcap, phi, CAPPED, BITS, TOKENS, M, T, D, DP, G, GP,
        )  # fmt: skip
        # Written so that a row whose maximum is NaN is computed again.
        inside = (top > phi + low) & (top < phi + high)
        store_share(part_ptr, stat_ptr, share, acc, total, tl.zeros_like(top) + phi, present & inside, d, valid, D)
        redo = present & (inside == 0)
    if tl.max(redo.to(tl.int32), 0) > 0:
        acc, total, top = synchronised_share(
            q, k_ptr, v_ptr, k_pairs_ptr, v_pairs_ptr, table_ptr, begin, end, oldest, kb, kr, vb, vr, pb,
            scale_log2, softcap, CAPPED, BITS, TOKENS, M, T, D, DP, G, GP,
        )  # fmt: skip
        store_share(part_ptr, stat_ptr, share, acc, total, top, redo, d, valid, D)


@triton.jit
def merge_kernel(
    part_ptr, stat_ptr, length_ptr, out_ptr, ob, oh, length_more, heads, splits,
    D: tl.constexpr, DP: tl.constexpr, SHARES: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    """Program (sequence and head): the shares of a row, each with the maximum it used, into out; no position: zeros.

    Shares of rotated rows are rotated back.
    """
    row = tl.program_id(0)
    b = row // heads
    d = tl.arange(0, DP)
    acc = tl.zeros((DP,), tl.float32)
    total = 0.0
    top = float("-inf")
    for s0 in range(0, splits, SHARES):
        split = s0 + tl.arange(0, SHARES)
        share = row.to(tl.int64) * splits + split
        held = split < splits
        used = tl.load(stat_ptr + share * 2, mask=held, other=float("-inf"))
        sums = tl.load(stat_ptr + share * 2 + 1, mask=held, other=0.0)
        # A share without positions wrote no part.
        mask = (held & (sums != 0))[:, None] & (d < D)[None, :]
        part = tl.load(part_ptr + share[:, None] * D + d[None, :], mask=mask, other=0.0)
        higher = tl.maximum(top, tl.max(used, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(used - base)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(sums * weight, 0)
        acc = acc * shrink + tl.sum(part * weight[:, None], 0)
        top = higher
    written = tl.load(length_ptr + b) + length_more > 0
    out = tl.where(written, acc / total, 0.0)
    if POWER != 0:
        out = tl.reshape(rotated(tl.reshape(out, (1, DP)), POWER, POWER // 2), (DP,))
    at = b.to(tl.int64) * ob + (row % heads) * oh
    tl.store(out_ptr + at + d, round_to(out, out_ptr.dtype.element_ty), mask=d < D)


def bind_view(
    q: Tensor, view: CacheView, position_nbytes: int, table: Tensor | None, lengths: Tensor, length_more: int,
    kv_heads: int, capacity: int, scale: float, window: int, softcap: float, phi: float, low: float, high: float,
    splits: int | None, out: Tensor,
) -> Callable[[], None]:  # fmt: skip
    """A call that fills out [B, H, D] from q and a view of the cache, of arguments that have been checked.

    A sequence has lengths[b] + length_more positions, at most `capacity`, each of position_nbytes for a KV head.
    """
    batch, heads, dim = q.shape
    if q.numel() == 0:
        return lambda: None
    group_heads = heads // kv_heads
    chosen = tile(view.constants["DP"], q.dtype.itemsize, view.constants["BITS"])
    rows = min(64, max(16, triton.next_power_of_2(group_heads)))
    if splits is None:
        sizes = (capacity, chosen.positions, part_nbytes(group_heads, dim), position_nbytes)
        splits = split_count(batch * kv_heads, *sizes, processor_count(q.device))
    scale_log2, cap = score_factors(scale, softcap)
    attend: Any = decode_attention_kernel[(splits, batch * kv_heads, triton.cdiv(group_heads, rows))]
    merge: Any = merge_kernel[(batch * heads,)]

    def run() -> None:
        part = torch.empty(batch, heads, splits, dim, dtype=torch.float32, device=q.device)
        stat = torch.empty(batch, heads, splits, 2, dtype=torch.float32, device=q.device)
        attend(
            q, *view.pointers, table, lengths, part, stat, q.stride(0), q.stride(1), *view.strides,
            table.stride(0) if table is not None else 0, length_more, kv_heads, group_heads, splits, window,
            scale_log2, cap, phi * LOG2E, low * LOG2E, high * LOG2E,
            UNIFIED=high > low, CAPPED=softcap > 0, UNIT=view.unit, POWER=view.power, M=rows, T=chosen.positions,
            **view.constants,
            num_warps=chosen.num_warps, num_stages=chosen.num_stages,
        )  # fmt: skip
        merge(
            part, stat, lengths, out, out.stride(0), out.stride(1), length_more, heads, splits,
            D=dim, DP=triton.next_power_of_2(dim), SHARES=MERGED, POWER=view.power, num_warps=4,
        )  # fmt: skip

    return run


def _check(op: str, q: Tensor, lengths: Tensor, name: str, kv_heads: int, window: int, out: Tensor) -> None:
    if q.dim() != 3:
        fail(op, "q", f"must be [B, H, D], got shape {tuple(q.shape)}")
    check_tensor(op, "q", q)
    if kv_heads < 1 or q.shape[1] % kv_heads:
        fail(op, "kv_heads", f"must divide q's {q.shape[1]} heads, got {kv_heads}")
    if not 1 <= q.shape[2] <= 256:
        fail(op, "q", f"must have a head_dim of 1 .. 256, got {q.shape[2]}")
    if window < 0:
        fail(op, "window", f"must not be negative, got {window}")
    check_device(op, name, lengths, q.device)
    check_tensor(op, name, lengths, dtype=torch.int64, shape=(q.shape[0],))
    check_tensor(op, "out", out, device=q.device, dtype=q.dtype, shape=q.shape)


def decode_attention(
    q: Tensor, pool: Tensor, table: Tensor, lengths: Tensor, layout: BlockLayout, scale: float, window: int,
    softcap: float, phi: float, low: float, high: float, out: Tensor, splits: int | None = None,
) -> None:  # fmt: skip
    """Fill out [B, H, D] from q [B, H, D] and the blocks of `layout` that table [B, M] names; see the operator.

    phi, low and high as in `SoftmaxRange`; high <= low takes the synchronised softmax throughout. `splits` forces the
    number of shares per sequence. Nothing is synchronised with the host, so lengths and block numbers are not checked.
    ValueError names the argument that is wrong, before the launch.
    """
    op = "decode_attention"
    _check(op, q, lengths, "lengths", layout.kv_heads, window, out)
    check_pool(op, pool, layout)
    check_tensor(op, "q", q, dtype=layout.dtype, shape=(q.shape[0], q.shape[1], layout.head_dim))
    check_device(op, "pool", pool, q.device)
    check_table(op, table, q.shape[0], q.device)
    bind_view(
        q, paged_view(pool, layout), layout.position_nbytes, table, lengths, 0, layout.kv_heads,
        table.shape[1] * layout.tokens, scale, window, softcap, phi, low, high, splits, out,
    )()  # fmt: skip


def bind_decode_attention_contiguous(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, scale: float, window: int, softcap: float, out: Tensor,
    phi: float = 0.0, low: float = 0.0, high: float = 0.0, splits: int | None = None,
) -> Callable[[], None]:  # fmt: skip
    """decode_attention_contiguous as a call without arguments, on the tensors' contents then; checks are made here."""
    op = "attention"
    if k.dim() != 4:
        fail(op, "k", f"must be [B, Hkv, L, D], got shape {tuple(k.shape)}")
    _check(op, q, start, "start", k.shape[1], window, out)
    wanted = (q.shape[0], k.shape[1], k.shape[2], q.shape[2])
    for tensor, name in ((k, "k"), (v, "v")):
        check_tensor(op, name, tensor, device=q.device, dtype=q.dtype, shape=wanted)
    return bind_view(
        q, contiguous_view(k, v), 2 * q.shape[2] * q.dtype.itemsize, None, start, 1, k.shape[1], k.shape[2],
        scale, window, softcap, phi, low, high, splits, out,
    )  # fmt: skip


def decode_attention_contiguous(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, scale: float, window: int, softcap: float, out: Tensor,
    phi: float = 0.0, low: float = 0.0, high: float = 0.0, splits: int | None = None,
) -> None:  # fmt: skip
    """`forebay::attention` of one query per sequence: q [B, H, D], k, v [B, Hkv, L, D], start int64 [B] -> out as q.

    The query stands at position start[b] and sees positions up to it. fp32, bf16 or fp16; any strides but D's.
    """
    bind_decode_attention_contiguous(
        q, k, v, start, scale, window, softcap, out, phi, low, high, splits
    )()  # fmt: skip


def case(
    name: str, dtype: str, view: CacheView, heads: int, kv_heads: int, position_nbytes: int, unified: bool = False,
    load_nbytes: int = 16, in_suite: bool = True,
) -> AuditCase:  # fmt: skip
    """One sequence of 16384 positions, each of position_nbytes in the cache of a KV head, seen through `view`."""
    length, dim, bits, tokens = 16384, *(view.constants[n] for n in ("D", "BITS", "TOKENS"))
    itemsize = 4 if dtype == "fp32" else 2
    chosen = tile(view.constants["DP"], itemsize, bits)
    partial = part_nbytes(heads // kv_heads, dim)
    splits = split_count(kv_heads, length, chosen.positions, partial, position_nbytes, PROCESSORS)
    pointer = "*u8" if bits else f"*{dtype}"
    pairs = ("k_pairs_ptr", "v_pairs_ptr")
    absent = (*(pairs if view.pointers[2] is None else ()), *(() if tokens else ("table_ptr",)))
    signature = {"q_ptr": f"*{dtype}", "k_ptr": pointer, "v_ptr": pointer, "table_ptr": "*i32"}
    signature |= dict.fromkeys(pairs, "*i32") | dict.fromkeys(absent, "constexpr")
    signature |= {"length_ptr": "*i64", "part_ptr": "*fp32", "stat_ptr": "*fp32"}
    strides = ("qb", "qh", "kb", "kh", "kr", "vb", "vh", "vr", "pb", "ph")
    signature |= dict.fromkeys((*strides, "table_stride"), "i32")
    signature |= dict.fromkeys(("length_more", "kv_heads", "group_heads", "splits", "window"), "i32")
    signature |= dict.fromkeys(("scale_log2", "softcap", "phi", "low", "high"), "fp32")
    minimum = length * kv_heads * position_nbytes + 2 * heads * dim * itemsize + (4 * length // 64 if tokens else 0)
    constants: dict[str, Any] = {"UNIFIED": unified, "CAPPED": False, "UNIT": view.unit, "POWER": view.power, "M": 16}
    return AuditCase(
        name=f"{name}/{dim}x{heads}/{kv_heads}-{dtype}",
        fn=decode_attention_kernel,
        signature=signature,
        constants=constants | {"T": chosen.positions} | view.constants | dict.fromkeys(absent),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        # What strides of packed rows are multiples of is said by UNIT.
        divisible=(*(n for n, kind in signature.items() if kind.startswith("*")),
                   *(strides[:2] if view.unit > 1 else strides)),
        uses_dot=True,
        main_operands=2,
        load_nbytes=load_nbytes,
        bytes_moved=minimum + 2 * kv_heads * splits * partial,
        minimum_bytes=minimum,
        archs=("sm_80", "sm_90") if dtype == "fp32" else ("sm_80", "sm_90", "gfx942"),
        in_suite=in_suite,
    )  # fmt: skip


def _case(
    name: str, format: str, dtype: str, heads: int, kv_heads: int, dim: int, unified: bool, paged: bool
) -> AuditCase:
    """Blocks of 64 where paged."""
    torch_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    layout = BlockLayout(64, kv_heads, dim, format, torch_dtype)
    row = torch.empty(1, kv_heads, 1, dim, dtype=torch_dtype)
    pool = torch.empty(1, layout.record_nbytes, dtype=torch.uint8)
    view = paged_view(pool, layout) if paged else contiguous_view(row, row)
    return case(f"decode_attention/{name}", dtype, view, heads, kv_heads, layout.position_nbytes, unified)


def audit_cases() -> list[AuditCase]:
    """Llama-3-8B (32 query heads on 8), OPT-30B (56 on 56) and Gemma-2-9B (16 on 8, D = 256), at 16384 positions."""
    return [
        _case("unified", "native", "bf16", 32, 8, 128, True, True),
        _case("synchronised", "native", "bf16", 32, 8, 128, False, True),
        _case("contiguous", "native", "fp16", 32, 8, 128, True, False),
        _case("unified", "native", "fp16", 56, 56, 128, True, True),
        _case("unified", "native", "bf16", 16, 8, 256, True, True),
        _case("unified", "native", "fp16", 9, 3, 64, True, True),
        _case("unified-kv8", "kv8", "bf16", 32, 8, 128, True, True),
        _case("unified-kv4", "kv4", "bf16", 32, 8, 128, True, True),
        _case("unified-kv8", "kv8", "fp16", 56, 56, 128, True, True),
        _case("unified-kv4", "kv4", "fp16", 56, 56, 128, True, True),
    ]
