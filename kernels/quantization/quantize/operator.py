"""`forebay::quantize` and `forebay::dequantize`: group-wise asymmetric 4 and 8 bits (FlexGen, section 5).

Along dimension `dim`, `group_size` consecutive elements share a scale and a low: code q = round((x - low) / scale),
ties to even, and x ~ q * scale + low, all in fp32. Layout: `packing`. Rounding of the range:

    minmax  the paper's formula on the stored range: low is the minimum rounded down to scale_dtype, and scale the rest
            of the range over 2^bits - 1, rounded up. So every x lies in the range, and the round-trip error is at most
            half the stored scale (within fp32 rounding: 2^-22 of the range). A group of equal values has scale 0 and
            is exact where scale_dtype holds the value. Where it holds minimum and scale, codes are the paper's.
    mse     of the ranges clipped by MSE_CLIPS, each refitted to its codes by least squares, the one with the least
            squared error; never worse than minmax in that measure. Clipped values are off by more than half a step.
    symmetric  low is -2^(bits-1) scales to the bit, so that the middle code stands for 0, as runtimes without lows ask;
            the round-trip error is at most half the stored scale, which is up to twice that of minmax.

A group that holds NaN or infinity, or a range that scale_dtype cannot (beyond 65504 for fp16), gets scale NaN and
codes 0: all of it reads back as NaN. On the CPU `quantize` raises ValueError instead; on CUDA it does not look.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forebay.kernels.cpu_support import native
from forebay.kernels.operator import Operator, each_once
from forebay.kernels.quantization.quantize.cpu import NATIVE_MAX_GROUP, is_plain, native_dequantize, quantize_into
from forebay.kernels.quantization.quantize.reference import (
    check,
    check_packed,
    dequantize_reference,
    output_shapes,
    reference,
)


@torch.library.custom_op("forebay::quantize", mutates_args=(), device_types="cpu")
def quantize(
    x: Tensor, bits: int, group_size: int, dim: int, scale_dtype: torch.dtype, rounding: str = "minmax"
) -> tuple[Tensor, Tensor, Tensor]:
    """x of any shape, groups of group_size along dim -> (packed uint8, scale, low).

    With size = x.shape[dim] and g = ceil(size / group_size), they have x's shape but along dim: packed has
    g * group_size * bits / 8 bytes, scale and low g elements. x is fp32, bf16 or fp16; bits 4 or 8; group_size even.
    ValueError names what is wrong, NaN and infinity in x included.
    """
    check(x, bits, group_size, dim, scale_dtype, rounding)
    moved = x.movedim(dim, -1)
    shapes = output_shapes(tuple(moved.shape), bits, group_size, -1)
    dtypes = (torch.uint8, scale_dtype, scale_dtype)
    made = [torch.empty(shapes[i > 0], dtype=dtype) for i, dtype in enumerate(dtypes)]
    matrices = tuple(part.view(-1, part.shape[-1]) if part.numel() else part.view(0, 0) for part in made)
    if x.numel():
        quantize_into(moved.reshape(-1, moved.shape[-1]), bits, group_size, rounding, matrices)
    packed, scale, low = (part.movedim(-1, dim).contiguous() for part in made)
    return packed, scale, low


@quantize.register_fake
def _(
    x: Tensor, bits: int, group_size: int, dim: int, scale_dtype: torch.dtype, rounding: str = "minmax"
) -> tuple[Tensor, Tensor, Tensor]:
    check(x, bits, group_size, dim, scale_dtype, rounding)
    codes, groups = output_shapes(tuple(x.shape), bits, group_size, dim)
    return (
        x.new_empty(codes, dtype=torch.uint8),
        x.new_empty(groups, dtype=scale_dtype),
        x.new_empty(groups, dtype=scale_dtype),
    )


@quantize.register_kernel("cuda")
def _(
    x: Tensor, bits: int, group_size: int, dim: int, scale_dtype: torch.dtype, rounding: str = "minmax"
) -> tuple[Tensor, Tensor, Tensor]:
    check(x, bits, group_size, dim, scale_dtype, rounding)
    if rounding != "minmax":  # a search made once per weight: torch's own kernels serve
        return reference(x, bits, group_size, dim, scale_dtype, rounding)
    from forebay.kernels.quantization.quantize import gpu

    return gpu.quantize(x, bits, group_size, dim, scale_dtype)


@torch.library.custom_op("forebay::dequantize", mutates_args=(), device_types="cpu")
def dequantize(
    packed: Tensor,
    scale: Tensor,
    low: Tensor | None,
    bits: int,
    group_size: int,
    dim: int,
    size: int,
    dtype: torch.dtype,
    codebook: str = "",
) -> Tensor:
    """Turn the result of `quantize` back into x of dtype with `size` elements along dim: q * scale + low in fp32, then
    rounded once.

    Without low it is -2^(bits - 1) * scale, as the rounding "symmetric" makes it. With a codebook a value is
    codebook[q] * scale (`packing`).

    The three may be strided, as `packing.unpack_rows` gives them. ValueError names what is wrong.
    """
    check_packed(packed, scale, low, bits, group_size, dim, size, dtype, codebook)
    parts = (packed, scale, low)
    plain = packed.dim() == 2 and dim % 2 == 1 and is_plain(*(t for t in parts if t is not None))
    if not plain or group_size > NATIVE_MAX_GROUP or native.load() is None:
        return dequantize_reference(packed, scale, low, bits, group_size, dim, size, dtype, codebook)
    x = torch.empty(packed.shape[0], size, dtype=dtype)
    if x.numel():
        native_dequantize(parts, x, bits, group_size, codebook)()
    return x


@dequantize.register_fake
def _(packed: Tensor, *others: Any) -> Tensor:
    check_packed(packed, *others)
    dim, size, dtype = others[4:7]
    shape = list(packed.shape)
    shape[dim] = size
    return packed.new_empty(shape, dtype=dtype)


@dequantize.register_kernel("cuda")
def _(*arguments: Any) -> Tensor:
    check_packed(*arguments)
    from forebay.kernels.quantization.quantize import gpu

    return gpu.dequantize(*arguments)


QUANTIZE = Operator(torch.ops.forebay.quantize.default, reference, each_once)
DEQUANTIZE = Operator(torch.ops.forebay.dequantize.default, dequantize_reference, each_once)
