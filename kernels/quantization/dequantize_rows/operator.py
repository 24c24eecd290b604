"""`forebay::dequantize_rows`: packed rows back to numbers, where no operator consumes them packed.

Layout: `packing`. The product `linear_q` reads rows themselves; this is for everything else, such as
the rows of a quantized embedding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forebay.kernels.cpu_support import native
from forebay.kernels.define import define_operator
from forebay.kernels.operator import Call, Use, each_once
from forebay.kernels.quantization.dequantize_rows.cpu import bind_dequantize_rows, workspace_nbytes
from forebay.kernels.quantization.dequantize_rows.onnx import dequantize_rows as dequantize_rows_onnx
from forebay.kernels.quantization.dequantize_rows.reference import check, reference
from forebay.kernels.quantization.quantize.cpu import NATIVE_MAX_GROUP


def _dequantize_rows(
    rows: Tensor, in_features: int, bits: int, group_size: int, scale_dtype: torch.dtype, dtype: torch.dtype,
    transposed: bool, symmetric: bool = False, codebook: str = "",
) -> Tensor:
    """rows uint8 [..., R] -> [..., K] of dtype; with transposed, rows [N, R] -> [K, N]."""
    shape = (in_features, rows.shape[0]) if transposed else (*rows.shape[:-1], in_features)
    return rows.new_empty(shape, dtype=dtype)


def _bind_cuda(use: Use) -> Call:
    from forebay.kernels.quantization.dequantize_rows.gpu import bind_dequantize_rows as bind

    return bind(*use.args, out=use.out[0])


def _workspace(use: Use) -> int:
    rows, in_features, _, group_size = use.args[:4]
    if not use.args[6] and group_size <= NATIVE_MAX_GROUP and native.load() is not None:
        return 0  # rows in Programs stand equally far from each other
    return workspace_nbytes(math.prod(rows.shape[:-1]), in_features, group_size)


DEQUANTIZE_ROWS = define_operator(
    _dequantize_rows,
    check=lambda rows, in_features, bits, group_size, scale_dtype, dtype, transposed, symmetric, codebook: check(
        rows, in_features, bits, group_size, transposed, symmetric),
    reference=reference,
    cost=each_once,
    bind={"cpu": lambda use: bind_dequantize_rows(*use.args, out=use.out[0]), "cuda": _bind_cuda},
    workspace={"cpu": _workspace},
    layouts={"rows": "columns"},
    onnx=dequantize_rows_onnx,
)
