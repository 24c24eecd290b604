"""The definition of `forebay::rms_norm`, and the checks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.cpu_support import native

MAX_COLUMNS = 16384  # numbers of a row that the GPU's kernels of both norms keep in registers


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The definition by torch, on any device: x [..., H] and weight [H] -> [..., H] of x's dtype."""
    wide = x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def _fail(argument: str, problem: str) -> None:
    raise ValueError(f"rms_norm: {argument} {problem}")


def check(x: Tensor, weight: Tensor, out: Tensor | None = None) -> None:
    """ValueError names the argument whose shape, dtype or device is wrong."""
    for tensor, name in ((x, "x"), (weight, "weight"), (out, "out")):
        if tensor is None:
            continue
        if tensor.dtype not in native.DTYPES or tensor.dtype != x.dtype:
            _fail(name, f"must be fp32, bf16 or fp16 and of x's dtype {x.dtype}, got {tensor.dtype}")
        if tensor.device.type != "cpu":
            _fail(name, f"must be on the CPU, got {tensor.device}")
    if x.dim() == 0:
        _fail("x", "must have at least one dimension")
    if weight.shape != x.shape[-1:]:
        _fail("weight", f"must have shape {tuple(x.shape[-1:])} as x asks, got {tuple(weight.shape)}")
    if out is not None and out.shape != x.shape:
        _fail("out", f"must have x's shape {tuple(x.shape)}, got {tuple(out.shape)}")
