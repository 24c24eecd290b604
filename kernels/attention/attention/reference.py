"""The definition of `forebay::attention`, and the checks of its arguments."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

from forebay.kernels.attention.chosen_rows import check_chosen
from forebay.kernels.attention.scoring import NOTHING, AttentionExtras
from forebay.kernels.cpu_support import native

Position = TypeVar("Position", int, Tensor)


def first_seen(position: Position, window: int) -> Position:
    """The lowest position that a query at `position` sees; negative where a window reaches before the first."""
    return position // -window * -window if window < 0 else position - window + 1 if window else position * 0


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float64,
    extras: AttentionExtras = NOTHING,
) -> Tensor:
    """Attention in dtype by the definition, on any device: q [B, H, S, D], k and v [B, Hkv, L, D] -> [B, S, H, D]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(group, 1), v.to(dtype).repeat_interleave(group, 1)
    scores = q @ k.mT * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    position = start[:, None, None, None] + torch.arange(q.shape[2], device=q.device)[:, None]
    t = torch.arange(k.shape[2], device=q.device)
    end = position + 1 if extras.until is None else extras.until[:, None, :, None]
    hidden = (t >= end) | (t < first_seen(position, window))
    if extras.chosen is not None:
        hidden = hidden | ~(extras.chosen[..., None] == t).any(2)[:, None]
    weights = softmax_with(scores.masked_fill(hidden, -math.inf), extras.sinks)
    # What is beyond a sequence's end may be anything, NaN too: it must not be multiplied, not even by zero.
    unwritten = (t >= start[:, None] + q.shape[2])[:, None, :, None]
    return (weights @ v.masked_fill(unwritten, 0.0)).transpose(1, 2)


def softmax_with(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of scores [B, H, S, L] along the last dimension, with a sink of each head among them."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]


def fail(argument: str, problem: str) -> None:
    raise ValueError(f"attention: {argument} {problem}")


def check_heads(heads: int, kv_heads: int) -> None:
    """ValueError where the heads of a cache do not divide those of queries."""
    if kv_heads == 0 or heads % kv_heads:
        fail("k", f"must have a number of heads that divides q's {heads}, got {kv_heads}")


def check(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, sinks: Tensor | None = None, until: Tensor | None = None,
    chosen: Tensor | None = None,
) -> None:
    """ValueError names the argument whose shape or dtype is wrong."""
    for tensor, name in ((q, "q"), (k, "k"), (v, "v")):
        if tensor.dim() != 4:
            fail(name, f"must have four dimensions, got shape {tuple(tensor.shape)}")
        if tensor.dtype not in native.DTYPES or tensor.dtype != q.dtype:
            fail(name, f"must be fp32, bf16 or fp16 and of q's dtype {q.dtype}, got {tensor.dtype}")
    batch, heads, _, dim = q.shape
    if k.shape[0] != batch or k.shape[3] != dim:
        fail("k", f"must be [{batch}, Hkv, L, {dim}] as q asks, got shape {tuple(k.shape)}")
    check_heads(heads, k.shape[1])
    if v.shape != k.shape:
        fail("v", f"must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    if start.dtype != torch.int64 or start.shape != (batch,):
        fail("start", f"must be int64 of shape {(batch,)}, got {start.dtype} {tuple(start.shape)}")
    if sinks is not None and (sinks.dtype != q.dtype or sinks.shape != (heads,)):
        fail("sinks", f"must be {q.dtype} of shape {(heads,)}, got {sinks.dtype} {tuple(sinks.shape)}")
    if until is not None and (until.dtype != torch.int64 or until.shape != (batch, q.shape[2])):
        fail("until", f"must be int64 of shape {(batch, q.shape[2])}, got {until.dtype} {tuple(until.shape)}")
    if chosen is not None:
        check_chosen("attention", q, chosen)


def refuse_start(q: Tensor, k: Tensor, start: Tensor) -> None:
    fail("start", f"must leave positions within 0 .. {k.shape[2]}, got {start.tolist()} and {q.shape[2]} queries")
