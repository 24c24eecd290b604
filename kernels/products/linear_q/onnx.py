"""`forebay::linear_q` in ONNX: MatMulNBits over the codes as they are, or the matrix that they stand for."""

from __future__ import annotations

from typing import Any

import torch

from forebay.kernels.formats.packing import Packing
from forebay.kernels.onnx_meaning import MICROSOFT, OnnxGraph, OnnxValue
from forebay.kernels.products.linear.onnx import followed
from forebay.kernels.quantization.dequantize_rows.onnx import dequantized


def linear_q(
    g: OnnxGraph, x: OnnxValue, rows: OnnxValue, bias: str | None, multiplier: str | None, residual: str | None,
    activation: str, *how: Any,
) -> str:  # fmt: skip
    """The product with what packed rows stand for (`how`: a `Packing`), rounded no further."""
    assert rows.parts is not None
    bits, in_features, group_size, *_ = Packing(*how)
    whole = group_size >= 16 and group_size & (group_size - 1) == 0
    if g.dialect == "microsoft" and whole and x.dtype == torch.float32:
        y = _by_codes(g, x, rows, bits, in_features, group_size)
    else:
        matrix = dequantized(g, rows.parts, bits, in_features, x.dtype, 2)
        y = g.op("MatMul", x, g.op("Transpose", matrix, perm=[1, 0]))
    return followed(g, y, bias, multiplier, residual, activation)


def _by_codes(g: OnnxGraph, x: OnnxValue, rows: OnnxValue, bits: int, in_features: int, group_size: int) -> str:
    """x W^T for W = (code - middle) * scale + rest: MatMulNBits takes whole numbers as zero points, a low is none, so
    what is left of it, the same for a group, is multiplied by the sum of x over the group. Symmetric rows have none."""
    assert rows.parts is not None
    codes, scale, low = rows.parts
    middle, dims = 1 << (bits - 1), len(x.shape)
    scales = g.once(("scales", scale), lambda: g.cast(scale, torch.float32))  # [N, g]
    how: dict[str, Any] = {"accuracy_level": 4} if g.int8_activations else {}
    y = g.op("MatMulNBits", x, codes, g.op("Reshape", scales, g.constant([-1])), domain=MICROSOFT, K=in_features,
             N=codes.shape[0], bits=bits, block_size=group_size, **how)
    if low is None:
        return str(y)
    rest = g.once(("rest", low), lambda: g.op("Transpose", g.op("Add", g.cast(low, torch.float32), g.op(
        "Mul", scales, g.constant(float(middle), torch.float32))), perm=[1, 0]))  # [g, N]

    def sums() -> str:  # [..., g]
        whole: str = x
        if in_features % group_size:
            pads = [0] * dims + [0] * (dims - 1) + [group_size - in_features % group_size]
            whole = g.op("Pad", x, g.constant(pads))
        parts = g.op("Reshape", whole, g.constant([0] * (dims - 1) + [-1, group_size]))
        return g.op("ReduceSum", parts, g.constant([-1]), keepdims=0)

    return g.op("Add", y, g.op("MatMul", g.once(("sums", x, group_size), sums), rest))
