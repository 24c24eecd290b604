"""`forebay::activation_append_q` in Triton: hidden states to packed rows of a checkpoint, every byte moved once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.formats import packing, row_sizes
from forebay.kernels.gpu_support.arguments import check_device, fail
from forebay.kernels.gpu_support.launches import bound, kernel_call
from forebay.kernels.quantization.quantize.gpu import group_codes, group_range, pack_codes

SCALE_DTYPE = torch.float16
TILE = 2048  # features of one program at most
ROW_ALIGN = tl.constexpr(row_sizes.WEIGHT_ALIGN)


@triton.jit
def activation_append_q_kernel(
    x_ptr, rows_ptr, codes_ptr, scale_ptr, low_ptr, queries, features, groups, capacity, row_nbytes,
    xb, xs, cb, cl, sb, sl, rb, rs,
    BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Program (token, tile of groups); a token whose row is outside the cache is left out.

    FULL: GROUP divides features.
    """
    token = tl.program_id(0)
    b = (token // queries).to(tl.int64)
    s = (token % queries).to(tl.int64)
    position = tl.load(rows_ptr + b * rb + s * rs)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    kept = group < tl.where((position >= 0) & (position < capacity), groups, 0)
    place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    valid = None
    if not FULL:
        valid = place < features
    there = (group < groups)[:, None] if FULL else valid
    x = tl.load(x_ptr + b * xb + s * xs + place, mask=there, other=0.0).to(tl.float32)
    scale, low = group_range(x, valid, scale_ptr.dtype.element_ty, BITS)
    codes = pack_codes(group_codes(x, valid, scale, low, BITS, False), scale, BITS, 1)
    NBYTES: tl.constexpr = GROUP * BITS // 8
    row = codes_ptr + b * cb + position * cl
    at = group[:, None] * NBYTES + tl.arange(0, NBYTES)[None, :]
    tl.store(row + at, codes, mask=kept[:, None])
    tl.store(scale_ptr + b * sb + position * sl + group, scale, mask=kept)
    tl.store(low_ptr + b * sb + position * sl + group, low, mask=kept)
    # What is left of the row is zeros; the program of the first groups writes them.
    used = groups * (NBYTES + 4) + tl.arange(0, ROW_ALIGN)
    ending = (position >= 0) & (position < capacity) & (tl.program_id(1) == 0)
    tl.store(row + used, tl.zeros((ROW_ALIGN,), tl.uint8), mask=ending & (used < row_nbytes))


def tile(features: int, group: int) -> tuple[int, int]:
    """(groups, warps) of one program: 16 features a thread."""
    wide = max(group, min(TILE, triton.next_power_of_2(features)))
    return wide // group, max(1, wide // 512)


def bind_activation_append_q(cache: Tensor, x: Tensor, rows: Tensor, bits: int, group: int) -> Callable[[], None]:
    """A call that writes x [B, S, H] into the packed rows [B, S] of cache [B, L, R]; arguments checked as the operator
    does. A row outside the cache is left out."""
    op = "activation_append_q"
    check_device(op, "cache", cache)
    if x.stride(2) != 1 and x.shape[2] > 1:
        fail(op, "x", f"must have a contiguous last dimension, got strides {x.stride()}")
    if x.numel() == 0:
        return lambda: None
    batch, queries, features = x.shape
    parts = packing.unpack_rows(cache, features, bits, group, SCALE_DTYPE)
    count = parts[1].shape[2]
    wide, warps = tile(features, group)
    return bound(kernel_call(
        activation_append_q_kernel, (batch * queries, triton.cdiv(count, wide)),
        x, rows, *parts, queries, features, count, *cache.shape[1:],
        *x.stride()[:2], *cache.stride()[:2], *parts[1].stride()[:2], *rows.stride(),
        BITS=bits, GROUP=group, GROUPS=wide, FULL=features % group == 0, num_warps=warps,
    ))  # fmt: skip
