"""The definition of `forebay::layer_norm`, and the checks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The definition in float64, on any device: x [..., H], weight and bias [H] -> [..., H]."""
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight.double()
    return y if bias is None else y + bias.double()


def check(x: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor | None = None) -> None:
    """ValueError names the argument whose shape, dtype or device is wrong."""
    op = "layer_norm"
    for tensor, name in ((x, "x"), (weight, "weight"), (bias, "bias"), (out, "out")):
        if tensor is None:
            continue
        if tensor.dtype not in FLOATS or tensor.dtype != x.dtype:
            raise ValueError(f"{op}: {name} must be fp32, bf16 or fp16 and of x's dtype {x.dtype}, got {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"{op}: {name} must be on x's device {x.device}, got {tensor.device}")
        wanted = x.shape if name in ("x", "out") else x.shape[-1:]
        if tensor.shape != wanted or x.dim() == 0:
            raise ValueError(f"{op}: {name} must have shape {tuple(wanted) or '[..., H]'}, got {tuple(tensor.shape)}")
