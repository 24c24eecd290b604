"""`forebay::linear` in ONNX."""

from __future__ import annotations

from forebay.kernels.onnx_meaning import MICROSOFT, OnnxGraph, OnnxValue


def linear(
    g: OnnxGraph, x: OnnxValue, weight: OnnxValue, bias: str | None = None, multiplier: str | None = None,
    residual: str | None = None, activation: str = "",
) -> str:
    """act(x W^T + bias) * multiplier + residual."""
    return followed(g, g.op("MatMul", x, g.transposed(weight)), bias, multiplier, residual, activation)


def followed(
    g: OnnxGraph, y: str, bias: str | None, multiplier: str | None, residual: str | None, activation: str
) -> str:
    """Apply the operators that follow a matmul, in their order."""
    y = y if bias is None else g.op("Add", y, bias)
    y = activated(g, y, activation)
    y = y if multiplier is None else g.op("Mul", y, multiplier)
    return y if residual is None else g.sum(y, residual)


def activated(g: OnnxGraph, y: str, activation: str) -> str:
    """An activation, as `linear` names it."""
    if activation == "silu":
        return g.op("QuickGelu", y, domain=MICROSOFT, alpha=1.0) if g.dialect == "microsoft" else (
            g.op("Mul", y, g.op("Sigmoid", y)))
    if activation == "relu":
        return g.op("Relu", y)
    if activation:
        return g.op("Gelu", y, approximate="tanh" if activation == "gelu_tanh" else "none")
    return y
