"""`forebay::dequantize_rows` on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forebay.kernels.cpu_support import native
from forebay.kernels.formats import packing, row_sizes
from forebay.kernels.quantization.dequantize_rows.reference import check, reference
from forebay.kernels.quantization.quantize.cpu import NATIVE_MAX_GROUP, native_dequantize


def workspace_nbytes(rows: int, in_features: int, group_size: int) -> int:
    """Upper bound, in bytes, of what a call takes beside rows and result: codes, their floats, products and sums, and
    what rounding compares and clamps."""
    return rows * row_sizes.group_count(in_features, group_size) * group_size * (2 + 4 * 6)


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
