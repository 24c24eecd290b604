"""`forebay::add_rms_norm`: the sum of a branch and the residual stream, and the sum's root-mean-square norm."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels import rms_norm


def reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, summed) by torch, on any device: summed = round(x + residual), normed = rms_norm of it."""
    summed = x + residual
    return rms_norm.reference(summed, weight, eps), summed


def check(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    """ValueError names the argument whose shape, dtype or device is wrong."""
    for tensor, name in ((residual, "residual"), (weight, "weight")):
        if tensor.dtype != x.dtype or tensor.device != x.device:
            raise ValueError(f"add_rms_norm: {name} must be of x's dtype {x.dtype} on {x.device}, got {tensor.dtype} "
                             f"on {tensor.device}")  # fmt: skip
    if residual.shape != x.shape:
        raise ValueError(f"add_rms_norm: residual must have x's shape {tuple(x.shape)}, got {tuple(residual.shape)}")
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(f"add_rms_norm: weight must have x's last dimension {tuple(x.shape[-1:])}, got "
                         f"{tuple(weight.shape)}")  # fmt: skip


@torch.library.custom_op("forebay::add_rms_norm", mutates_args=(), device_types="cpu")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [..., H], weight [H] -> (normed, summed), both contiguous; ValueError names what is wrong."""
    check(x, residual, weight)
    summed = torch.add(x, residual, out=x.new_empty(x.shape))
    normed = x.new_empty(x.shape)
    rms_norm.bind_rms_norm(summed, weight, eps, normed)()
    return normed, summed


@add_rms_norm.register_kernel("cuda")
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from forebay.kernels.gpu.rms_norm import rms_norm as launch

    normed, summed = x.new_empty(x.shape), x.new_empty(x.shape)
    launch(x, weight, eps, normed, residual, summed)
    return normed, summed


@add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)
