"""The norms in ONNX."""

from __future__ import annotations

import torch

from forebay.kernels.onnx_meaning import MICROSOFT, OnnxGraph, OnnxValue


def rms_norm(g: OnnxGraph, x: OnnxValue, weight: str, eps: float) -> str:
    """x / sqrt(mean x^2 + eps) * weight. In the older opset the parts, which onnxruntime makes one operator of."""
    if g.dialect == "standard":
        return g.op("RMSNormalization", x, weight, axis=-1, epsilon=eps, stash_type=1)
    terms = _summands(g, x, weight)
    if terms is not None:
        return g.op("SkipSimplifiedLayerNormalization", *terms, weight, domain=MICROSOFT, named=("", "", x),
                    epsilon=eps)
    wide = x if x.dtype == torch.float32 else g.cast(x, torch.float32)
    mean = g.op("ReduceMean", g.op("Pow", wide, g.constant(2.0, torch.float32)), g.constant([-1]), keepdims=1)
    deviation = g.op("Sqrt", g.op("Add", mean, g.constant(eps, torch.float32)))
    normed = g.op("Div", wide, deviation)
    return g.op("Mul", normed if x.dtype == torch.float32 else g.cast(normed, x.dtype), weight)


def layer_norm(g: OnnxGraph, x: OnnxValue, weight: str | None, bias: str | None, eps: float) -> str:
    """(x - mean) / sqrt(variance + eps) * weight + bias."""
    scale = g.constant([1.0] * (x.shape[-1] or 1), x.dtype) if weight is None else weight
    shift = [] if bias is None else [bias]
    terms = _summands(g, x, scale, *shift) if g.dialect == "microsoft" else None
    if terms is not None:
        return g.op("SkipLayerNormalization", *terms, scale, *shift, domain=MICROSOFT, named=("", "", x), epsilon=eps)
    return g.op("LayerNormalization", x, scale, *shift, axis=-1, epsilon=eps)


def _summands(g: OnnxGraph, x: OnnxValue, *others: str) -> tuple[str, str] | None:
    """Return the operands that onnxruntime's own norm may add to make x, its fourth result."""
    return g.summands(x, *others) if len(x.shape) == 3 and x.dtype == torch.float32 else None
