"""`forebay::expanded_attention` in Triton: some heads at a time, their keys and values are made in scratch, and
`prefill_attention` attends to them. Rows after the last query's are not expanded. Packed rows are unpacked first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.attention.expanded_attention.gpu_scratch import ScratchNeed, scratch_need
from forebay.kernels.attention.expanded_attention.reference import PLAIN, ExpandedSizes, RowCodes, check
from forebay.kernels.attention.prefill_attention import gpu as prefill_attention
from forebay.kernels.attention.scoring import Scoring
from forebay.kernels.gpu_support.arguments import check_tensor, stages
from forebay.kernels.gpu_support.cache_rows import check_rows, packed_view
from forebay.kernels.gpu_support.cache_tiles import AttendedCache, check_head_dim, contiguous_view, dot, round_to
from forebay.kernels.gpu_support.launches import KernelCall, bound_with_scratch, kernel_call
from forebay.kernels.gpu_support.unpacked_rows import unpack_call
from forebay.kernels.operator import Call

OP = "expanded_attention"


class ExpandTile(NamedTuple):
    """Rows, numbers made of each, columns of a turn, warps and pipeline stages."""

    rows: int
    made: int
    columns: int
    num_warps: int
    num_stages: int


TILES = {2: ExpandTile(128, 128, 64, 8, 3), 4: ExpandTile(32, 64, 32, 4, 2)}  # by bytes of a number


@triton.jit
def expand_kernel(
    rows_ptr, start_ptr, up_ptr, k_ptr, v_ptr, rb, rr, heads, length, queries, rank, rotated, plain, value, wide,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Program (BN numbers of those made, BM rows, sequence and head): keys [B, heads, L, wide] and values [B, heads, L,
    value] of rows before the end of the step's queries.

    The first programs of each row also write what follows the `plain` numbers of a key: the row's rotated part, zeros.
    """
    b = (tl.program_id(2) // heads).to(tl.int64)
    head = (tl.program_id(2) % heads).to(tl.int64)
    end = tl.minimum(tl.load(start_ptr + b) + queries, length)
    first = tl.program_id(1) * BM
    if first >= end:
        return
    t = (first + tl.arange(0, BM)).to(tl.int64)
    there = (t < end)[:, None]
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    made = plain + value
    row_at = rows_ptr + b * rb + t[:, None] * rr
    up_at = up_ptr + head * made * rank + n.to(tl.int64)[:, None] * rank
    k_at = k_ptr + ((b * heads + head) * length + t)[:, None] * wide
    v_at = v_ptr + ((b * heads + head) * length + t)[:, None] * value
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    acc = tl.zeros((BM, BN), tl.float32)
    for c0 in range(0, rank, BK):
        c = (c0 + tl.arange(0, BK))[None, :]
        x = tl.load(row_at + c, mask=there & (c < rank), other=0.0)
        w = tl.load(up_at + c, mask=(n < made)[:, None] & (c < rank), other=0.0)
        acc = dot(x, tl.trans(w), acc)
    acc = round_to(acc, dtype)
    tl.store(k_at + n[None, :], acc, mask=there & (n < plain)[None, :])
    tl.store(v_at + (n - plain)[None, :], acc, mask=there & ((n >= plain) & (n < made))[None, :])
    if tl.program_id(0) == 0:
        d = tl.arange(0, TAIL)[None, :]
        x = tl.load(row_at + (rank + d), mask=there & (d < rotated), other=0.0)
        tl.store(k_at + (plain + d), x, mask=there & (d < wide - plain))


def expand_call(
    rows: Tensor, start: Tensor, up: Tensor, sizes: ExpandedSizes, keys: Tensor, values: Tensor
) -> KernelCall:
    """The launch that makes keys [B, H, L, wide] and values [B, H, L, value] of rows [B, 1, L, rank + rotated] by `up`
    [H, plain + value, rank]."""
    batch, heads, length, wide = keys.shape
    tile = TILES[rows.dtype.itemsize]
    return kernel_call(
        expand_kernel, (triton.cdiv(sizes.made, tile.made), triton.cdiv(length, tile.rows), batch * heads),
        rows, start, up, keys, values, rows.stride(0), rows.stride(2), heads, length, sizes.queries, sizes.rank,
        sizes.dim - sizes.plain, sizes.plain, sizes.value, wide, BM=tile.rows, BN=tile.made, BK=tile.columns,
        TAIL=max(16, triton.next_power_of_2(wide - sizes.plain)), num_warps=tile.num_warps,
        num_stages=stages(tile.num_stages),
    )  # fmt: skip


def bind_expanded_attention(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, scoring: Scoring, up: Tensor, plain: int, out: Tensor,
    codes: RowCodes = PLAIN,
) -> Callable[[], None]:  # fmt: skip
    """expanded_attention as a call without arguments, on the tensors' contents at each call; checks are made here."""
    check(q, k, v, start, up, plain, codes)
    batch, heads, queries, dim = q.shape
    sizes = ExpandedSizes(batch, heads, queries, k.shape[2], up.shape[2], dim, plain, up.shape[1] - plain)
    check_tensor(OP, "q", q)
    check_head_dim(OP, q)
    check_tensor(OP, "up", up.flatten(0, 1), device=q.device)
    check_tensor(OP, "start", start, device=q.device, dtype=torch.int64)
    check_tensor(OP, "out", out, device=q.device, dtype=q.dtype, shape=(batch, queries, heads, sizes.value))
    if codes.bits:
        check_tensor(OP, "k", k, device=q.device, dtype=torch.uint8)
        check_rows(OP, k, "k", sizes.rank + dim - plain)
    else:
        check_tensor(OP, "k", k, device=q.device, dtype=q.dtype)
    if q.numel() == 0:
        return lambda: None
    need = scratch_need(sizes, q.dtype.itemsize, codes.bits > 0)
    parts = _Expanding(q, k, start, up, out)
    return bound_with_scratch(q.device, need.nbytes, 0, lambda scratch, _: _launches(
        parts, sizes, need, codes, scoring, scratch.view(q.dtype)))


class _Expanding(NamedTuple):
    q: Tensor
    rows: Tensor
    start: Tensor
    up: Tensor
    out: Tensor


def _launches(
    operands: _Expanding, sizes: ExpandedSizes, need: ScratchNeed, codes: RowCodes, scoring: Scoring, scratch: Tensor
) -> list[KernelCall | Call]:
    """The launches of a step, in order, over `scratch` in q's dtype."""
    q, rows, start, up, out = operands
    batch, heads, queries, dim = q.shape
    made = list[KernelCall | Call]()
    if codes.bits:
        view = packed_view(rows, rows, sizes.rank + dim - sizes.plain, *codes)
        values = scratch[need.rows_at :][: batch * sizes.length * view.constants["D"]]
        values = values.view(batch, 1, sizes.length, -1)
        made.append(unpack_call(rows, view, start, queries, values))
        rows = values
    if need.wide > dim:  # zeros after the narrower queries and keys change no score
        wider = scratch[need.queries_at :][: batch * heads * queries * need.wide].view(batch, heads, queries, need.wide)
        made.append(_widened(q, wider))
        q = wider
    for first in range(0, heads, need.heads):
        part = slice(first, min(heads, first + need.heads))
        shape: Any = (batch, part.stop - part.start, sizes.length)
        count = shape[0] * shape[1] * shape[2]
        keys = scratch[: count * need.wide].view(*shape, need.wide)
        values = scratch[need.values_at :][: count * sizes.value].view(*shape, sizes.value)
        made.append(expand_call(rows, start, up[part], sizes, keys, values))
        cache = AttendedCache(contiguous_view(keys, values), shape[1], sizes.length, 0, start)
        made.append(prefill_attention.bind_view(q[:, part], cache, scoring, out[:, :, part]))
    return made


def _widened(q: Tensor, wider: Tensor) -> Call:
    """A call that copies queries to rows of more values, zeros after them."""
    dim = q.shape[3]
    return lambda: (wider[..., :dim].copy_(q), wider[..., dim:].zero_())
