"""The definition of `forebay::sparse_values`, and the checks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def reference(weights: Tensor, v: Tensor, keep: int) -> Tensor:
    """The definition in float64, on any device: the weights that are dropped set to zero, and a dense product."""
    heads, seen = weights.shape[1], weights.shape[3]
    kept, index = torch.topk(weights.double(), keep, dim=-1)
    sparse = torch.zeros(weights.shape, dtype=torch.float64, device=weights.device).scatter(-1, index, kept)
    values = v[:, :, :seen].double().repeat_interleave(heads // v.shape[1], 1)
    return (sparse @ values).transpose(1, 2)


def _fail(argument: str, problem: str) -> None:
    raise ValueError(f"sparse_values: {argument} {problem}")


def check(weights: Tensor, v: Tensor, keep: int) -> None:
    """ValueError names the argument whose shape, dtype, device or value is wrong."""
    for tensor, name, wanted in ((weights, "weights", "[B, H, S, T]"), (v, "v", "[B, Hkv, L, D]")):
        if tensor.dim() != 4:
            _fail(name, f"must be {wanted}, got shape {tuple(tensor.shape)}")
        if tensor.dtype not in FLOATS:
            _fail(name, f"must be fp32, bf16 or fp16, got {tensor.dtype}")
    if weights.device != v.device:
        _fail("weights", f"must be on v's device {v.device}, got {weights.device}")
    batch, heads, _, seen = weights.shape
    if v.shape[0] != batch or v.shape[1] == 0 or heads % v.shape[1] or v.shape[2] < seen:
        _fail("v", f"must be [{batch}, a divisor of {heads}, at least {seen}, D], got shape {tuple(v.shape)}")
    if not 0 < keep <= seen:
        _fail("keep", f"must be in 1 .. {seen}, got {keep}")
