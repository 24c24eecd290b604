"""Causal attention of a chunk of queries over a cache that already holds the chunk's own keys and values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

CHUNK_NBYTES = 4 << 20  # scores (float32) that the soft-capped path computes at once


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor, scale: float, window: int, softcap: float
) -> torch.Tensor:
    """q [B, H, S, D], k and v [B, Hkv, L, D], start [B] -> [B, S, H, D], in the precision of q.

    Query s of sequence b stands at start[b] + s and sees cache positions up to its own, the last `window` of them if
    window > 0; scores are softcap * tanh(score / softcap) if softcap > 0; head h reads key-value head h // (H / Hkv).
    """
    groups = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ keys.transpose(-1, -2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    seen = _mask(q.shape[2], k.shape[2], start, window, q.device)
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    return (weights @ values).transpose(1, 2)


def _mask(queries: int, keys: int, start: torch.Tensor, window: int, device: torch.device) -> torch.Tensor:
    """Which positions each query sees: bool [B, S, L]."""
    at = start.to(device)[:, None, None] + torch.arange(queries, device=device)[None, :, None]
    position = torch.arange(keys, device=device)[None, None, :]
    seen = position <= at
    return seen & (position > at - window) if window else seen


def attention_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor, scale: float, window: int, softcap: float,
    out: torch.Tensor,
) -> None:
    """`reference` into `out` [B, S, H, D], by the fastest way torch has for the case."""
    batch, heads, queries, width = q.shape
    groups = heads // k.shape[1]
    starts = start.tolist()
    lowest, highest = min(starts), max(starts)
    length = highest + queries
    k, v = k[:, :, :length], v[:, :, :length]
    same = lowest == highest
    if softcap:
        _softcapped(q, k, v, start, scale, window, softcap, out)
    elif queries == 1:
        # one query per head: the heads of a group become the query rows of their shared key-value head
        mask = None if same and not window else _mask(1, length, start, window, q.device)[:, None]
        rows = q.reshape(batch, k.shape[1], groups, width)
        out.copy_(sdpa(rows, k, v, attn_mask=mask, scale=scale).reshape(batch, 1, heads, -1))
    else:
        causal = same and lowest == 0 and not window
        mask = None if causal else _mask(queries, length, start[:1] if same else start, window, q.device)[:, None]
        for g in range(groups):
            part = sdpa(q[:, g::groups], k, v, attn_mask=mask, is_causal=causal, scale=scale)
            out[:, :, g::groups] = part.transpose(1, 2)


def _softcapped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor, scale: float, window: int, softcap: float,
    out: torch.Tensor,
) -> None:
    """Explicit scores, a few sequences and queries at a time so that they take a bounded number of bytes."""
    batch, heads, queries, width = q.shape
    kv_heads, length = k.shape[1], k.shape[2]
    step = max(1, CHUNK_NBYTES // (4 * heads * length))
    for b in range(batch):
        for lower in range(0, queries, step):
            upper = min(queries, lower + step)
            rows = q[b, :, lower:upper].reshape(kv_heads, -1, width)  # [Hkv, G * S, D]
            scores = torch.baddbmm(rows.new_empty(()), rows, k[b].transpose(-1, -2), beta=0, alpha=scale).float()
            scores.div_(softcap).tanh_().mul_(softcap)
            seen = _mask(upper - lower, length, start[b : b + 1] + lower, window, q.device)
            scores.view(kv_heads, -1, upper - lower, length).masked_fill_(~seen[None], float("-inf"))
            weights = scores.softmax(-1).to(q.dtype)
            part = (weights @ v[b]).view(heads, upper - lower, width)
            out[b, lower:upper] = part.transpose(0, 1)


def workspace_nbytes(
    batch: int, heads: int, kv_heads: int, queries: int, length: int, width: int, dtype: torch.dtype, softcap: float
) -> int:
    """An upper bound of what `attention_out` allocates beside its operands, in bytes."""
    result = batch * queries * heads * width * dtype.itemsize
    mask = batch * queries * length * (1 + 8 + dtype.itemsize)
    scores = 0
    if softcap:
        rows = min(queries, max(1, CHUNK_NBYTES // (4 * heads * length)))
        scores = 5 * 4 * heads * rows * length
    threads = 2 * torch.get_num_threads() * 4 * (32 * 512 + 32 * width)  # tiles of torch's CPU kernel
    return 2 * result + mask + scores + threads


@torch.library.custom_op("forebay::attention", mutates_args=())
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor, scale: float, window: int, softcap: float
) -> torch.Tensor:
    """Attention over a cache, [B, S, H, D]; see `reference` for the meaning of the arguments."""
    _check(q, k, v, start)
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])
    attention_out(q, k, v, start, scale, window, softcap, out)
    return out


@attention.register_fake
def _(q, k, v, start, scale, window, softcap):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor) -> None:
    for name, value, dims in (("q", q, 4), ("k", k, 4), ("v", v, 4), ("start", start, 1)):
        if value.dim() != dims:
            raise ValueError(f"forebay::attention: {name} must have {dims} dimensions, has shape {list(value.shape)}")
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(f"forebay::attention: k {list(k.shape)} and v {list(v.shape)} do not fit q {list(q.shape)}")
    if start.dtype != torch.int64 or start.shape[0] != q.shape[0]:
        raise ValueError(f"forebay::attention: start must be int64 [{q.shape[0]}], is {start.dtype} {list(start.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"forebay::attention: q is {q.dtype}, k {k.dtype}, v {v.dtype}; they must be one dtype")


def bind_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor, scale: float, window: int, softcap: float,
    *, out: torch.Tensor,
) -> Callable[[], None]:
    """A call without arguments that computes into `out`; `start` is read each time."""
    _check(q, k, v, start)
    return lambda: attention_out(q, k, v, start, scale, window, softcap, out)
