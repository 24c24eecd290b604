"""The definition of `forebay::rotary`, and the checks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.cpu_support import native


def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The definition by torch, on any device: x [B, H, S, D], cos and sin [B or 1, S, D] -> [B, H, S, D]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def fail(argument: str, problem: str) -> None:
    raise ValueError(f"rotary: {argument} {problem}")


def check(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> None:
    """ValueError names the argument whose shape, dtype or device is wrong."""
    for tensor, name in ((x, "x"), (cos, "cos"), (sin, "sin"), (out, "out")):
        if tensor is None:
            continue
        if tensor.dtype not in native.DTYPES or tensor.dtype != x.dtype:
            fail(name, f"must be fp32, bf16 or fp16 and of x's dtype {x.dtype}, got {tensor.dtype}")
        if tensor.device.type != "cpu":
            fail(name, f"must be on the CPU, got {tensor.device}")
    if x.dim() != 4:
        fail("x", f"must be [B, H, S, D], got shape {tuple(x.shape)}")
    batch, _, queries, dim = x.shape
    for table, name in ((cos, "cos"), (sin, "sin")):
        if table.dim() != 3 or table.shape[0] not in (1, batch) or table.shape[1:] != (queries, dim):
            fail(name, f"must be [{batch} or 1, {queries}, {dim}] as x asks, got shape {tuple(table.shape)}")
    if out is not None and out.shape != x.shape:
        fail("out", f"must have x's shape {tuple(x.shape)}, got {tuple(out.shape)}")
