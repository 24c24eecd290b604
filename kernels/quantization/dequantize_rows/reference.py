"""The definition of `forebay::dequantize_rows`, and the checks of its arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from forebay.kernels.formats import packing, row_sizes
from forebay.kernels.quantization.quantize.reference import dequantize_reference


class Unpacking(NamedTuple):
    """Arguments for unpacking rows, besides the rows, in the operator's order."""

    in_features: int
    bits: int
    group_size: int
    scale_dtype: torch.dtype
    dtype: torch.dtype
    transposed: bool
    symmetric: bool = False
    codebook: str = ""


def reference(
    rows: Tensor, in_features: int, bits: int, group_size: int, scale_dtype: torch.dtype, dtype: torch.dtype,
    transposed: bool, symmetric: bool = False, codebook: str = "",
) -> Tensor:
    """rows uint8 [..., N, R] -> [..., N, K] of dtype, or [K, N] if transposed; code * scale + low in fp32, rounded."""
    parts = packing.unpack_rows(rows, in_features, bits, group_size, scale_dtype, symmetric)
    found = dequantize_reference(*parts, bits, group_size, -1, in_features, dtype, codebook)
    return found.mT.contiguous() if transposed else found


def check(
    rows: Tensor, in_features: int, bits: int, group_size: int, transposed: bool, symmetric: bool = False
) -> None:
    """ValueError names the argument that is wrong."""
    row_sizes.check_format("dequantize_rows", bits, group_size)
    needed = row_sizes.row_nbytes(in_features, bits, group_size, symmetric=symmetric)
    if rows.dtype != torch.uint8 or rows.dim() < 1 or rows.shape[-1] != needed:
        raise ValueError(f"dequantize_rows: rows must be uint8 [..., {needed}] for {in_features} features of {bits} "
                         f"bits, got {rows.dtype} {tuple(rows.shape)}")
    if transposed and rows.dim() != 2:
        raise ValueError(f"dequantize_rows: rows must be a matrix to be transposed, got {tuple(rows.shape)}")
