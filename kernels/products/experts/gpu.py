"""`forebay::experts` in Triton: one launch for each matrix of all experts, over picks that are sorted by expert.

    sort    where each pick stands among those of ascending entries, and where each entry's picks end
    up      rows of x meet their entry's first matrix, and the activation what it gives
    down    those rows meet the second; results wait in fp32, pick by pick
    sum     of each token, in the order of its picks

A program of `up` and `down` has some columns of one entry for some of its picks, and ends at once where it has none.
Packed rows become values of x's dtype in registers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.cpu_support.matrices import as_matrix
from forebay.kernels.formats.codebooks import CODEBOOKS
from forebay.kernels.gpu_support.arguments import check_device, check_tensor
from forebay.kernels.gpu_support.cache_tiles import dot, round_to
from forebay.kernels.gpu_support.codebooks import coded_scale, number_of
from forebay.kernels.gpu_support.launches import KernelCall, bound_with_scratch, kernel_call
from forebay.kernels.products.experts.gpu_scratch import scratch_offsets
from forebay.kernels.products.experts.reference import Experts, Form, Storage, Stored, check_experts, fail, sizes
from forebay.kernels.products.linear.gpu_epilogue import activate

OP = "experts"
SORTED = 64  # picks, or entries, that a program of the sort places, and picks that it compares them with at a time
COLUMNS, SUMMED = 64, 256


@triton.jit
def entries_of(index_ptr, entries_ptr, pick, there, experts, first, entries, HAS_ENTRIES: tl.constexpr):
    """The entry of each pick; `entries` for one whose expert has none."""
    expert = tl.load(index_ptr + pick, mask=there, other=-1)
    if HAS_ENTRIES:
        known = (expert >= 0) & (expert < experts)
        entry = tl.load(entries_ptr + tl.where(known, expert, 0), mask=there & known, other=-1)
    else:
        entry = tl.where(expert >= 0, expert - first, -1)
    return tl.where((entry >= 0) & (entry < entries), entry, entries).to(tl.int32)


@triton.jit
def sort_kernel(
    index_ptr, entries_ptr, order_ptr, ends_ptr, picks, experts, first, entries,
    HAS_ENTRIES: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The first programs write picks in the order of their entries, the others where each entry's picks end."""
    blocks = tl.cdiv(picks, B)
    place = tl.program_id(0)
    if place < blocks:
        own = place * B + tl.arange(0, B)
        mine = entries_of(index_ptr, entries_ptr, own, own < picks, experts, first, entries, HAS_ENTRIES)
    else:
        own = (place - blocks) * B + tl.arange(0, B)
        mine = own
    before = tl.zeros((B,), tl.int32)
    for j in range(0, picks, B):
        other = j + tl.arange(0, B)
        theirs = entries_of(index_ptr, entries_ptr, other, other < picks, experts, first, entries, HAS_ENTRIES)
        if place < blocks:
            ahead = (theirs[None, :] < mine[:, None]) | (
                (theirs[None, :] == mine[:, None]) & (other[None, :] < own[:, None]))
        else:
            ahead = theirs[None, :] <= mine[:, None]
        before += tl.sum((ahead & (other < picks)[None, :]).to(tl.int32), 1)
    if place < blocks:
        tl.store(order_ptr + before, own, mask=own < picks)
    else:
        tl.store(ends_ptr + own, before, mask=own < entries)


@triton.jit
def values_at(
    w_ptr, n, at, inside, row, dtype: tl.constexpr, TRANSPOSED: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, SYMMETRIC: tl.constexpr, CODEBOOK: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """[BK, BN] of dtype: inputs `at` of output rows n of a matrix, whose rows are `row` elements, or bytes, apart."""
    if BITS == 0:
        if TRANSPOSED:
            return tl.load(w_ptr + at.to(tl.int64)[:, None] * row + n[None, :], mask=inside, other=0.0)
        return tl.load(w_ptr + n.to(tl.int64)[None, :] * row + at[:, None], mask=inside, other=0.0)
    rows = w_ptr + n.to(tl.int64)[None, :] * row
    code = tl.load(rows + (at * BITS // 8)[:, None], mask=inside, other=0).to(tl.int32)
    if BITS == 4:
        code = (code >> (at % 2 * 4)[:, None]) & 15
    halves = (rows + GROUPS * GROUP * BITS // 8).to(tl.pointer_type(SCALE)) + (at // GROUP)[:, None]
    if CODEBOOK > 0:
        upper = tl.load(halves, mask=inside, other=0.0)
        lower = upper if SYMMETRIC else tl.load(halves + GROUPS, mask=inside, other=0.0)
        scale = coded_scale(upper, lower, SYMMETRIC)
        return round_to(number_of(code, CODEBOOK) * scale, dtype)
    scale = tl.load(halves, mask=inside, other=0.0).to(tl.float32)
    value = code.to(tl.float32) * scale
    if SYMMETRIC:
        return round_to(value - scale * (1 << (BITS - 1)), dtype)
    return round_to(value + tl.load(halves + GROUPS, mask=inside, other=0.0).to(tl.float32), dtype)


@triton.jit
def product(
    x_at, live, share, w_ptr, n, used, row, k, BK: tl.constexpr, SCALED: tl.constexpr, TRANSPOSED: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SYMMETRIC: tl.constexpr,
    CODEBOOK: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """[BM, BN] in fp32: rows at x_at [BM], times their `share` if SCALED, with output rows n of a matrix."""
    dtype: tl.constexpr = x_at.dtype.element_ty
    sums = tl.zeros((x_at.shape[0], n.shape[0]), tl.float32)
    for begin in range(0, k, BK):
        at = begin + tl.arange(0, BK)
        x = tl.load(x_at[:, None] + at[None, :], mask=live[:, None] & (at < k)[None, :], other=0.0)
        if SCALED:
            x = round_to(x.to(tl.float32) * round_to(share, dtype).to(tl.float32)[:, None], dtype)
        w = values_at(w_ptr, n, at, (at < k)[:, None] & used[None, :], row, dtype, TRANSPOSED, BITS, GROUP, GROUPS,
                      SYMMETRIC, CODEBOOK, SCALE)  # fmt: skip
        sums = dot(x, w, sums)
    return sums


@triton.jit
def plain_activation(x, ACTIVATION: tl.constexpr):
    """Apply an activation to a number; "" leaves it."""
    if ACTIVATION == "":
        y = x
    elif ACTIVATION == "relu2":
        y = tl.where(x < 0.0, 0.0, x)
        y = y * y
    else:
        y = activate(x, ACTIVATION)
    return y


@triton.jit
def gated(gate, value, alpha, limit, ACTIVATION: tl.constexpr, LIMITED: tl.constexpr, dtype: tl.constexpr):
    """act(gate) * value, each rounded to dtype; or gpt-oss's (value + 1) * gate * sigmoid(alpha * gate)."""
    if LIMITED:
        gate = tl.where(gate > limit, limit, gate)
        value = tl.where(value > limit, limit, tl.where(value < -limit, -limit, value))
    if ACTIVATION == "alpha_swiglu":
        inner = round_to(alpha * gate, dtype).to(tl.float32)
        sigmoid = round_to(1.0 / (1.0 + tl.exp(-inner)), dtype).to(tl.float32)
        y = round_to(value + 1.0, dtype).to(tl.float32) * round_to(gate * sigmoid, dtype).to(tl.float32)
    else:
        y = round_to(plain_activation(gate, ACTIVATION), dtype).to(tl.float32) * value
    return y


@triton.jit
def up_kernel(
    x_ptr, order_ptr, ends_ptr, share_ptr, w_ptr, bias_ptr, out_ptr, picks, hidden, inner, xs, row, entry_stride,
    bias_stride, alpha, limit,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, LIMITED: tl.constexpr,
    TRANSPOSED: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    SYMMETRIC: tl.constexpr, CODEBOOK: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Program (tile of what `down` is given, entry, tile of its picks): out [P, F], in the order of `order`."""
    entry = tl.program_id(1)
    begin = tl.load(ends_ptr + entry - 1, mask=entry > 0, other=0)
    end = tl.load(ends_ptr + entry)
    if begin + tl.program_id(2) * BM >= end:
        return
    w_ptr += entry.to(tl.int64) * entry_stride
    bias_ptr += entry.to(tl.int64) * bias_stride
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    used = n < inner
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gates = 2 * n if INTERLEAVED else n
    values = 2 * n + 1 if INTERLEAVED else n + inner
    place = begin + tl.program_id(2) * BM + tl.arange(0, BM)
    live = place < end
    pick = tl.load(order_ptr + place, mask=live, other=0)
    share = tl.load(share_ptr + pick, mask=live, other=0.0).to(tl.float32)
    x_at = x_ptr + (pick // picks).to(tl.int64) * xs
    y = product(x_at, live, share, w_ptr, gates, used, row, hidden, BK, SCALED, TRANSPOSED, BITS, GROUP, GROUPS,
                SYMMETRIC, CODEBOOK, SCALE)  # fmt: skip
    if HAS_BIAS:
        y += tl.load(bias_ptr + gates, mask=used, other=0.0).to(tl.float32)[None, :]
    y = round_to(y, dtype).to(tl.float32)
    if GATED:
        z = product(x_at, live, share, w_ptr, values, used, row, hidden, BK, SCALED, TRANSPOSED, BITS, GROUP,
                    GROUPS, SYMMETRIC, CODEBOOK, SCALE)  # fmt: skip
        if HAS_BIAS:
            z += tl.load(bias_ptr + values, mask=used, other=0.0).to(tl.float32)[None, :]
        y = gated(y, round_to(z, dtype).to(tl.float32), alpha, limit, ACTIVATION, LIMITED, dtype)
    else:
        y = plain_activation(y, ACTIVATION)
    out_at = out_ptr + place.to(tl.int64)[:, None] * inner + n[None, :]
    tl.store(out_at, round_to(y, dtype), mask=live[:, None] & used[None, :])


@triton.jit
def down_kernel(
    x_ptr, order_ptr, ends_ptr, share_ptr, w_ptr, bias_ptr, out_ptr, hidden, inner, row, entry_stride, bias_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr,
    TRANSPOSED: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    SYMMETRIC: tl.constexpr, CODEBOOK: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, entry, tile of its picks): out fp32 [P, H] by pick, times its share unless SCALED."""
    entry = tl.program_id(1)
    begin = tl.load(ends_ptr + entry - 1, mask=entry > 0, other=0)
    end = tl.load(ends_ptr + entry)
    if begin + tl.program_id(2) * BM >= end:
        return
    w_ptr += entry.to(tl.int64) * entry_stride
    bias_ptr += entry.to(tl.int64) * bias_stride
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    used = n < hidden
    place = begin + tl.program_id(2) * BM + tl.arange(0, BM)
    live = place < end
    pick = tl.load(order_ptr + place, mask=live, other=0)
    share = tl.load(share_ptr + pick, mask=live, other=0.0).to(tl.float32)
    x_at = x_ptr + place.to(tl.int64) * inner
    y = product(x_at, live, share, w_ptr, n, used, row, inner, BK, False, TRANSPOSED, BITS, GROUP, GROUPS,
                SYMMETRIC, CODEBOOK, SCALE)  # fmt: skip
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=used, other=0.0).to(tl.float32)[None, :]
    if not SCALED:
        y *= share[:, None]
    tl.store(out_ptr + pick.to(tl.int64)[:, None] * hidden + n[None, :], y, mask=live[:, None] & used[None, :])


@triton.jit
def sum_kernel(
    part_ptr, index_ptr, entries_ptr, out_ptr, picks, hidden, os, experts, first, entries,
    HAS_ENTRIES: tl.constexpr, ACCUMULATE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, token): the sum of what its picks gave; those of no entry gave nothing."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * B + tl.arange(0, B)
    used = n < hidden
    out_at = out_ptr + token * os + n
    total = tl.zeros((B,), tl.float32)
    if ACCUMULATE:
        total += tl.load(out_at, mask=used, other=0.0).to(tl.float32)
    for j in range(picks):
        pick = token * picks + j
        entry = entries_of(index_ptr, entries_ptr, pick, True, experts, first, entries, HAS_ENTRIES)
        total += tl.load(part_ptr + pick * hidden + n, mask=used & (entry < entries), other=0.0)
    tl.store(out_at, round_to(total, out_ptr.dtype.element_ty), mask=used)


def tile(dtype: torch.dtype, tokens: int, each: float = 0.0) -> dict[str, int]:
    """Rows and columns of a program, inputs that it takes at a time, and warps, for so many tokens and `each` rows of
    an entry on average. Programs of one entry read its weights again for each tile of rows, and 64 rows are the least
    for which Hopper takes its factors from shared memory: cycles of a row are 9.4 in tiles of 32, 2.4 of 64, 1 of 128.
    """
    exact = dtype == torch.float32  # whose factors are in registers
    many = 32 if exact or each <= 32 else 64 if each <= 64 else 128
    return {"BM": 16 if tokens <= 64 else many, "BN": COLUMNS, "BK": 32 if exact else 64,
            "num_warps": 8 if many == 128 and tokens > 64 else 4}  # fmt: skip


def _stored_as(stored: Stored, k: int) -> dict[str, Any]:
    """The constants by which a matrix over k inputs is read."""
    group = stored.group_size or 1
    return {"BITS": stored.bits, "GROUP": group, "GROUPS": -(-k // group), "SYMMETRIC": stored.symmetric,
            "CODEBOOK": CODEBOOKS.index(stored.codebook),
            "SCALE": tl.bfloat16 if stored.scale_dtype == torch.bfloat16 else tl.float16}


class _PickSums(NamedTuple):
    """The destination of the sum of a token's picks, if any, and whether it is added there; and of each pick's result
    for other launches, if any."""

    out: Tensor | None
    accumulate: bool
    results: Tensor | None


def _launches(
    x: Tensor, index: Tensor, weights: Tensor, experts: Experts, form: Form, stored: Storage, sums: _PickSums,
    scratch: Tensor,
) -> Sequence[KernelCall]:
    hidden, _, inner = sizes(x, experts, form, stored)
    tokens, picks = index.shape
    count = experts.up.shape[0]
    at = scratch_offsets(index.numel(), count, hidden, inner, x.element_size())
    order, ends, given, parts = (scratch[begin:end].view(dtype) for (begin, end), dtype in zip(
        itertools.pairwise(at), (torch.int32, torch.int32, x.dtype, torch.float32), strict=True))
    out, results = sums.out, sums.results
    parts = parts if results is None else results
    named, known = (index, 0) if experts.entries is None else (experts.entries, len(experts.entries))
    whose: dict[str, Any] = {"HAS_ENTRIES": experts.entries is not None}
    how = tile(x.dtype, tokens, index.numel() / max(1, count)) | {"SCALED": form.scales_input}
    blocks = triton.cdiv(tokens, how["BM"])  # no token picks an expert twice
    bias = experts.up_bias, experts.down_bias
    strides = [0 if b is None else b.stride(0) for b in bias]
    summed, first, entries, by = named, experts.first, count, dict(whose)
    if results is not None:  # of all experts, whichever launches had them
        summed, first, entries, by = index, 0, known, {"HAS_ENTRIES": False}
    total = () if out is None else (
        kernel_call(sum_kernel, (tokens, triton.cdiv(hidden, SUMMED)),
                    parts, index, summed, out, picks, hidden, out.stride(0), known, first, entries, **by,
                    ACCUMULATE=sums.accumulate, B=SUMMED, num_warps=4),)  # fmt: skip
    return (
        kernel_call(sort_kernel, (triton.cdiv(index.numel(), SORTED) + triton.cdiv(count, SORTED),),
                    index, named, order, ends, index.numel(), known, experts.first, count, **whose, B=SORTED),
        kernel_call(up_kernel, (triton.cdiv(inner, COLUMNS), count, blocks),
                    x, order, ends, weights, experts.up, x if bias[0] is None else bias[0], given, picks, hidden, inner,
                    x.stride(0), experts.up.stride(1), experts.up.stride(0), strides[0], form.alpha, form.limit,
                    HAS_BIAS=bias[0] is not None, ACTIVATION=form.activation, GATED=form.gated,
                    INTERLEAVED=form.gated and form.interleaved, LIMITED=form.limit > 0,
                    TRANSPOSED=form.transposed, **how, **_stored_as(stored.up, hidden)),
        kernel_call(down_kernel, (triton.cdiv(hidden, COLUMNS), count, blocks),
                    given, order, ends, weights, experts.down, x if bias[1] is None else bias[1], parts, hidden, inner,
                    experts.down.stride(1), experts.down.stride(0), strides[1], HAS_BIAS=bias[1] is not None,
                    TRANSPOSED=form.down_transposed, **how, **_stored_as(stored.down, inner)),
        *total,
    )  # fmt: skip


def bind_experts(
    x: Tensor, index: Tensor, weights: Tensor, experts: Experts, form: Form, stored: Storage, out: Tensor | None,
    accumulate: bool = False, results: Tensor | None = None,
) -> Callable[[], None]:
    """The CPU's `bind_experts` on a GPU."""
    hidden, _, inner = sizes(x, experts, form, stored)
    check_experts(x, index, weights, experts, stored, x if out is None else out, results)
    for name, tensor in {"index": index, "weights": weights, "entries": experts.entries, **experts._asdict()}.items():
        if isinstance(tensor, Tensor):
            check_device(OP, name, tensor, x.device)
    check_tensor(OP, "x", x)
    for name, tensor in (("out", out), ("results", results)):
        if tensor is not None:
            check_tensor(OP, name, tensor, device=x.device)
    if x.numel() == 0:
        return lambda: None
    sums = _PickSums(None if out is None else as_matrix(out, "out", fail), accumulate, results)
    x2, picks = as_matrix(x, "x", fail), index.view(-1, index.shape[-1])
    nbytes = scratch_offsets(picks.numel(), experts.up.shape[0], hidden, inner, x.element_size()).end
    return bound_with_scratch(x.device, nbytes, 0, lambda scratch, _: _launches(
        x2, picks, weights.view(picks.shape), experts, form, stored, sums, scratch))
