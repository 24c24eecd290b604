"""`forebay::dequantize_rows`: packed rows back to numbers, where no operator consumes them packed.

Layout: `packing`. The products `linear_w4` and `linear_w8` read rows themselves; this is for everything else, such as
the rows of a quantised embedding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forebay.kernels import native, packing
from forebay.kernels.quantize import NATIVE_MAX_GROUP, dequantize_reference, native_dequantize


def reference(
    rows: Tensor, in_features: int, bits: int, group_size: int, scale_dtype: torch.dtype, dtype: torch.dtype,
    transposed: bool,
) -> Tensor:
    """rows uint8 [..., N, R] -> [..., N, K] of dtype, or [K, N] if transposed; code * scale + low in fp32, rounded."""
    parts = packing.unpack_rows(rows, in_features, bits, group_size, scale_dtype)
    found = dequantize_reference(*parts, bits, group_size, -1, in_features, dtype)
    return found.mT.contiguous() if transposed else found


def check(rows: Tensor, in_features: int, bits: int, group_size: int, transposed: bool) -> None:
    """ValueError names the argument that is wrong."""
    packing.check_format("dequantize_rows", bits, group_size)
    needed = packing.row_nbytes(in_features, bits, group_size)
    if rows.dtype != torch.uint8 or rows.dim() < 1 or rows.shape[-1] != needed:
        raise ValueError(f"dequantize_rows: rows must be uint8 [..., {needed}] for {in_features} features of {bits} "
                         f"bits, got {rows.dtype} {tuple(rows.shape)}")
    if transposed and rows.dim() != 2:
        raise ValueError(f"dequantize_rows: rows must be a matrix to be transposed, got {tuple(rows.shape)}")


@torch.library.custom_op("forebay::dequantize_rows", mutates_args=())
def dequantize_rows(
    rows: Tensor, in_features: int, bits: int, group_size: int, scale_dtype: torch.dtype, dtype: torch.dtype,
    transposed: bool,
) -> Tensor:
    """rows uint8 [..., R] -> [..., K] of dtype; with transposed, rows [N, R] -> [K, N]. Any device."""
    check(rows, in_features, bits, group_size, transposed)
    return reference(rows, in_features, bits, group_size, scale_dtype, dtype, transposed)


@dequantize_rows.register_fake
def _(
    rows: Tensor, in_features: int, bits: int, group_size: int, scale_dtype: torch.dtype, dtype: torch.dtype,
    transposed: bool,
) -> Tensor:
    shape = (in_features, rows.shape[0]) if transposed else (*rows.shape[:-1], in_features)
    return rows.new_empty(shape, dtype=dtype)


def workspace_nbytes(rows: Tensor, in_features: int, bits: int, group_size: int) -> int:
    """Upper bound, in bytes, of what a call takes beside rows and result: codes, their floats, products and sums, and
    what rounding compares and clamps."""
    count = rows.shape[:-1].numel() * packing.group_count(in_features, group_size) * group_size
    return count * (2 + 4 * 6)


def bind_dequantize_rows(
    rows: Tensor, in_features: int, bits: int, group_size: int, scale_dtype: torch.dtype, dtype: torch.dtype,
    transposed: bool, *, out: Tensor,
) -> Callable[[], None]:
    """A closure that fills out from the present contents of rows: by the C++ kernel where rows are contiguous."""
    check(rows, in_features, bits, group_size, transposed)
    plain = not transposed and rows.device.type == "cpu" and rows.is_contiguous() and out.is_contiguous()
    if plain and rows.numel() and group_size <= NATIVE_MAX_GROUP and native.load() is not None:
        matrix = rows.view(-1, rows.shape[-1])
        parts = packing.unpack_rows(matrix, in_features, bits, group_size, scale_dtype)
        return native_dequantize(parts, out.view(-1, in_features), bits, group_size)

    def call() -> None:
        out.copy_(reference(rows, in_features, bits, group_size, scale_dtype, dtype, transposed))

    return call
