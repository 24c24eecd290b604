"""Packed rows of a cache as values in scratch, for attention of many queries: each row is unpacked once a step."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.gpu_support.cache_tiles import CacheView, load_tile, round_to
from forebay.kernels.gpu_support.launches import KernelCall, kernel_call
from forebay.kernels.gpu_support.rotation import rotated_values

ROWS = 8  # of a program


@triton.jit
def unpack_rows_kernel(
    cache_ptr, start_ptr, out_ptr, cb, ch, cr, heads, length, queries,
    BITS: tl.constexpr, UNIT: tl.constexpr, POWER: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Program (ROWS positions, sequence and head): rows before the end of the step's queries, rotated back, to out
    [B, H, L, D]. Strides of the cache are multiples of UNIT."""
    b = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    end = tl.minimum(tl.load(start_ptr + b) + queries, length)
    first = tl.program_id(0) * ROWS
    if first >= end:
        return
    t = first + tl.arange(0, ROWS)
    cache_ptr += b * (cb // UNIT * UNIT) + head * (ch // UNIT * UNIT)
    x = load_tile(cache_ptr, t, t < end, cr // UNIT * UNIT, tl.float32, BITS, D, DP, G, GP)
    x, d, valid = rotated_values(x, D, DP, G, GP, POWER)
    if out_ptr.dtype.element_ty.is_fp16():  # which must not make infinity of a finite number
        x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
    at = out_ptr + ((b * heads + head) * length + t)[:, None] * D + d[None, :]
    tl.store(at, round_to(x, out_ptr.dtype.element_ty), mask=(t < end)[:, None] & valid[None, :])


def unpack_call(cache: Tensor, view: CacheView, start: Tensor, queries: int, out: Tensor) -> KernelCall:
    """The launch that unpacks the rows of the first cache of `view`, uint8 [B, H, L, R], into out [B, H, L, D], as far
    as `queries` of positions from start[b] on see them."""
    batch, heads, length, _ = cache.shape
    return kernel_call(
        unpack_rows_kernel, (triton.cdiv(length, ROWS), batch * heads),
        cache, start, out, *view.strides[:3], heads, length, queries, UNIT=view.unit, POWER=view.power, ROWS=ROWS,
        **view.constants, num_warps=4,
    )  # fmt: skip
