"""The definition of `forebay::sampling`, and the checks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _choose(scores: Tensor, uniforms: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Tokens [B] of finite-topped scores [B, V], computed in their dtype."""
    kept = torch.ones_like(scores, dtype=torch.bool)
    if 0 < top_k < scores.shape[1]:
        kept = scores >= scores.topk(top_k, dim=-1).values[:, -1:]
    mass = torch.where(kept, torch.exp((scores - scores.amax(-1, keepdim=True)) / temperature), 0.0)
    if top_p < 1:
        ascending, order = torch.where(kept, scores, -torch.inf).sort(-1)
        below = mass.gather(-1, order).cumsum(-1)
        # equal logits share the sum up to the last of them
        below = below.gather(-1, torch.searchsorted(ascending, ascending, right=True) - 1)
        stays = below > (1 - top_p) * below[:, -1:]
        stays[:, -1] = True
        mass = torch.where(torch.zeros_like(kept).scatter(-1, order, stays), mass, 0.0)
    cumulative = mass.cumsum(-1)
    chosen = torch.searchsorted(cumulative, uniforms[:, None].to(scores.dtype) * cumulative[:, -1:], right=True)[:, 0]
    last = scores.shape[1] - 1 - (mass > 0).flip(-1).to(torch.uint8).argmax(-1)
    return torch.minimum(chosen, last)


def sampled(
    logits: Tensor, uniforms: Tensor | None, temperature: float, top_k: int, top_p: float, dtype: torch.dtype
) -> Tensor:
    greedy = logits.argmax(-1)
    if uniforms is None:
        return greedy
    scores = logits.to(dtype)
    usable = scores.amax(-1).isfinite()
    safe = torch.where(usable[:, None], scores, 0.0)
    return torch.where(usable, _choose(safe, uniforms, temperature, top_k, top_p), greedy)


def reference(logits: Tensor, uniforms: Tensor | None, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The definition with probabilities in float64, on any device: tokens [B] int64."""
    return sampled(logits, uniforms, temperature, top_k, top_p, torch.float64)


def check(logits: Tensor, uniforms: Tensor | None, temperature: float, top_k: int, top_p: float) -> None:
    """ValueError names the argument whose shape, dtype, device or value is wrong."""
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.dtype not in FLOATS:
        raise ValueError(f"sampling: logits must be [B, V], V > 0, in fp32, bf16 or fp16, got {logits.dtype} "
                         f"{tuple(logits.shape)}")  # fmt: skip
    if uniforms is None:
        return
    if uniforms.shape != logits.shape[:1] or uniforms.dtype != torch.float32 or uniforms.device != logits.device:
        raise ValueError(f"sampling: uniforms must be fp32 of shape {tuple(logits.shape[:1])} on {logits.device}, got "
                         f"{uniforms.dtype} {tuple(uniforms.shape)} on {uniforms.device}")  # fmt: skip
    if temperature <= 0:
        raise ValueError(f"sampling: temperature must be above 0, got {temperature}; for greedy give no uniforms")
    if top_k < 0:
        raise ValueError(f"sampling: top_k must not be negative, got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"sampling: top_p must be in (0, 1], got {top_p}")
