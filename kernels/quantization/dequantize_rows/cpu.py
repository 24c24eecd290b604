"""`forebay::dequantize_rows` on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from forebay.kernels.cpu_support import native
from forebay.kernels.formats import packing, row_sizes
from forebay.kernels.quantization.dequantize_rows.reference import Unpacking, check, reference
from forebay.kernels.quantization.quantize.cpu import NATIVE_MAX_GROUP, native_dequantize


def workspace_nbytes(rows: int, in_features: int, group_size: int) -> int:
    """Upper bound, in bytes, of what a call takes beside rows and result where it is not the C++ kernel: codes, their
    floats, products and sums, and what rounding compares and clamps."""
    return rows * row_sizes.group_count(in_features, group_size) * group_size * (2 + 4 * 6)


def _as_matrix(rows: Tensor) -> Tensor | None:
    """rows [..., R] as a view [N, R] at even strides, as scales want; None where there is none."""
    try:
        matrix = rows.view(-1, rows.shape[-1])
    except RuntimeError:
        return None
    return matrix if matrix.stride(1) == 1 and matrix.stride(0) % 2 == 0 and matrix.storage_offset() % 2 == 0 else None


def bind_dequantize_rows(rows: Tensor, *how: Any, out: Tensor) -> Callable[[], None]:
    """A closure that fills out from the present contents of rows, `how` an `Unpacking`: by the C++ kernel if bytes of
    each are contiguous, and rows stand equally far from each other."""
    in_features, bits, group_size, scale_dtype, dtype, transposed, symmetric, codebook = Unpacking(*how)
    check(rows, in_features, bits, group_size, transposed, symmetric)
    plain = not transposed and rows.device.type == "cpu" and out.is_contiguous()
    matrix = _as_matrix(rows) if plain and rows.numel() and group_size <= NATIVE_MAX_GROUP else None
    if matrix is not None and native.load() is not None:
        parts = packing.unpack_rows(matrix, in_features, bits, group_size, scale_dtype, symmetric)
        return native_dequantize(parts, out.view(-1, in_features), bits, group_size, codebook)

    def call() -> None:
        out.copy_(reference(rows, in_features, bits, group_size, scale_dtype, dtype, transposed, symmetric, codebook))

    return call
