"""The definition of `forebay::sparse_attention`, and the checks of its arguments."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forebay.kernels.attention.attention.reference import check as check_plain
from forebay.kernels.attention.attention.reference import first_seen
from forebay.kernels.attention.attention_q.reference import check as check_packed
from forebay.kernels.attention.scoring import Scoring
from forebay.kernels.cache.kv_append_q import reference as kv_append_q


def reference(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, scoring: Scoring, kept: float, bits: int = 0, group: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """In dtype by the definition, on any device, sequence by sequence: q [B, H, 1, D], k and v [B, Hkv, L, D], or
    packed [B, Hkv, L, R] -> [B, 1, H, D]."""
    scale, window, softcap = scoring
    out = q.new_empty(q.shape[0], 1, q.shape[1], q.shape[3], dtype=dtype)
    for b, position in enumerate(start.tolist()):
        seen = slice(max(0, first_seen(position, window)), position + 1)
        keys, values = (_values(cache[b, :, seen], q, bits, group).to(dtype) for cache in (k, v))
        out[b, 0] = _attend(q[b, :, 0].to(dtype), keys, values, scale, softcap, kept)
    return out


def _values(cache: Tensor, q: Tensor, bits: int, group: int) -> Tensor:
    return kv_append_q.unpack(cache, q.shape[3], bits, group) if bits else cache


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, kept: float) -> Tensor:
    """q [H, D], k and v [Hkv, n, D] -> [H, D]."""
    heads, count = k.shape[:2]
    scores = torch.einsum("hgd,hnd->hgn", q.view(heads, -1, q.shape[-1]), k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.softmax(-1)
    others = weights[..., :-1].argsort(dim=-1, descending=True, stable=True)[..., : math.ceil(kept * (count - 1))]
    chosen = torch.cat([others, others.new_full((*others.shape[:-1], 1), count - 1)], -1)
    picked = v[:, None].expand(-1, chosen.shape[1], -1, -1).gather(
        2, chosen[..., None].expand(-1, -1, -1, v.shape[-1]))
    return torch.einsum("hgn,hgnd->hgd", weights.gather(-1, chosen), picked).reshape(q.shape)


def fail(argument: str, problem: str) -> None:
    raise ValueError(f"sparse_attention: {argument} {problem}")


def check(q: Tensor, k: Tensor, v: Tensor, start: Tensor, kept: float, bits: int, group: int) -> None:
    """ValueError names the argument whose shape or dtype is wrong."""
    if bits:
        check_packed(q, k, v, start, bits, group)
    else:
        check_plain(q, k, v, start)
    if q.shape[2] != 1:
        fail("q", f"must be of one query a sequence, got {q.shape[2]}")
    if not 0 < kept <= 1:
        fail("kept", f"must be a share above 0 and at most 1, got {kept}")
