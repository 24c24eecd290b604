"""The definition of `forebay::add_rms_norm`, and the checks of its arguments."""

from __future__ import annotations

from torch import Tensor

from forebay.kernels.norms.rms_norm import reference as rms_norm_reference


def reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, summed) by torch, on any device: summed = round(x + residual), normed = rms_norm of it."""
    summed = x + residual
    return rms_norm_reference.reference(summed, weight, eps), summed


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
