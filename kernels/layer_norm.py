"""`forebay::layer_norm` and `forebay::add_layer_norm`: layer norm over the last dimension, alone or after a sum.

out = (y - mean(y)) / sqrt(var(y) + eps) * weight + bias, rounded once, the variance biased (Ba et al. 2016); y is x,
or s = round(x + residual), which add_layer_norm returns too. fp32, bf16 or fp16, one dtype for all.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm as torch_layer_norm

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The definition in float64, on any device: x [..., H], weight and bias [H] -> [..., H]."""
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight.double()
    return y if bias is None else y + bias.double()


def check(op: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> None:
    """ValueError names op and the argument whose shape, dtype or device is wrong."""
    for tensor, name in ((x, "x"), (residual, "residual"), (weight, "weight"), (bias, "bias")):
        if tensor is None:
            continue
        if tensor.dtype not in FLOATS or tensor.dtype != x.dtype:
            raise ValueError(f"{op}: {name} must be fp32, bf16 or fp16 and of x's dtype {x.dtype}, got {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"{op}: {name} must be on x's device {x.device}, got {tensor.device}")
        wanted = x.shape if name in ("x", "residual") else x.shape[-1:]
        if tensor.shape != wanted or x.dim() == 0:
            raise ValueError(f"{op}: {name} must have shape {tuple(wanted) or '[..., H]'}, got {tuple(tensor.shape)}")


@torch.library.custom_op("forebay::layer_norm", mutates_args=(), device_types="cpu")
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., H] of any strides -> contiguous [..., H]; ValueError names the argument that is wrong."""
    check("layer_norm", x, None, weight, bias)
    return torch_layer_norm(x, x.shape[-1:], weight, bias, eps).contiguous()


@layer_norm.register_kernel("cuda")
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    from forebay.kernels.gpu.layer_norm import layer_norm as launch

    out = x.new_empty(x.shape)
    launch(x, weight, bias, eps, out)
    return out


@layer_norm.register_fake
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("forebay::add_layer_norm", mutates_args=(), device_types="cpu")
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """x, residual [..., H] -> (normed, summed), both contiguous; ValueError names the argument that is wrong."""
    check("add_layer_norm", x, residual, weight, bias)
    summed = torch.add(x, residual, out=x.new_empty(x.shape))
    return torch_layer_norm(summed, x.shape[-1:], weight, bias, eps), summed


@add_layer_norm.register_kernel("cuda")
def _(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    from forebay.kernels.gpu.layer_norm import layer_norm as launch

    out, summed = x.new_empty(x.shape), x.new_empty(x.shape)
    launch(x, weight, bias, eps, out, residual, summed)
    return out, summed


@add_layer_norm.register_fake
def _(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)
