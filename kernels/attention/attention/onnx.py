"""`forebay::attention` over a cache that `forebay::kv_append` wrote, in ONNX: one operator for both.

GroupQueryAttention appends, and attends over as many tokens as a row of attention_mask has ones, left-aligned; the
standard Attention appends behind whatever the cache holds, padding too, and hides what attention_mask hides. Where
caches are written in place, TensorScatter writes each sequence's tokens from the first one's position on, and a token
sees the positions up to its own.
"""

from __future__ import annotations

from typing import Any

import torch

from forebay.kernels.attention.attention.onnx_grouped import grouped
from forebay.kernels.attention.scoring import Scoring
from forebay.kernels.onnx_meaning import OnnxGraph, OnnxValue


def kv_append(g: OnnxGraph, k_cache: OnnxValue, v_cache: OnnxValue, k: str, v: str, start: str) -> None:
    """Noted only: attention appends."""
    g.append(k_cache, k)
    g.append(v_cache, v)


def attention(
    g: OnnxGraph, q: OnnxValue, k: OnnxValue, v: OnnxValue, start: str, scale: float, window: int, softcap: float,
    *more: Any,
) -> str:
    """q [B, H, S, D] over caches k and v [B, Hkv, P, D] and what follows in them -> [B, S, H, D]. NotImplementedError
    for attention within chunks, and with sinks."""
    if window < 0:
        raise NotImplementedError("attention within chunks")
    if any(value is not None for value in more[3:]):
        raise NotImplementedError("attention with sinks")
    (past_k, new_k), (past_v, new_v) = g.appended(k), g.appended(v)
    if g.dialect == "microsoft":
        found, present_k, present_v = grouped(g, q, (past_k, past_v), (new_k, new_v), k.shape[1] or 1,
                                              Scoring(scale, window, softcap))
    elif softcap or g.in_place:
        present_k, present_v = (g.op("TensorScatter", past, new, _starts(g)) if g.in_place else g.op(
            "Concat", past, new, axis=2) for past, new in ((past_k, new_k), (past_v, new_v)))
        hidden = _hidden_in_place(g, past_k, window, q.dtype) if g.in_place else _hidden(g, window, q.dtype)
        out = _by_parts(g, q, k, present_k, present_v, hidden, scale, softcap) if softcap else g.op(
            "Attention", q, present_k, present_v, hidden, scale=scale)
        found = g.op("Transpose", out, perm=[0, 2, 1, 3])
    else:
        out, present_k, present_v = g.op("Attention", q, new_k, new_v, _hidden(g, window, q.dtype), past_k, past_v,
                                         outputs=3, scale=scale)
        found = g.op("Transpose", out, perm=[0, 2, 1, 3])
    g.present(k, present_k)
    g.present(v, present_v)
    return found


def _by_parts(
    g: OnnxGraph, q: OnnxValue, cache: OnnxValue, k: str, v: str, hidden: str, scale: float, softcap: float
) -> str:
    """The scores are capped before they are hidden, which the operator does the other way round. [B, H, S, D]."""
    heads, of, width = q.shape[1] or 1, cache.shape[1] or 1, q.shape[3]
    spread = g.constant([1, 1, heads // of, 1, 1])
    whole = g.constant([0, heads, -1, width])
    k, v = (g.op("Reshape", g.op("Expand", g.op("Unsqueeze", t, g.constant([2])), spread), whole) for t in (k, v))
    scores = g.op("Mul", g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2])), g.constant(scale, q.dtype))
    capped = g.op("Mul", g.op("Tanh", g.op("Div", scores, g.constant(softcap, q.dtype))), g.constant(softcap, q.dtype))
    return str(g.op("MatMul", g.op("Softmax", g.op("Add", capped, hidden), axis=-1), v))


def _starts(g: OnnxGraph) -> str:
    """[B]: where each sequence's first token of the step stands."""
    return g.once("starts", lambda: g.op("Gather", "position_ids", g.constant(0), axis=1))


def _hidden_in_place(g: OnnxGraph, cache: str, window: int, dtype: torch.dtype) -> str:
    """[B, 1, S, L] to add to scores over a whole cache [B, Hkv, L, D]."""

    def make() -> str:
        room = g.op("Squeeze", g.op("Shape", cache, start=2, end=3))
        keys = g.op("Range", g.constant(0), room, g.constant(1))  # [L]
        queries = g.op("Unsqueeze", "position_ids", g.constant([1, 3]))  # [B, 1, S, 1]
        seen = g.op("LessOrEqual", keys, queries)
        if window:
            seen = g.op("And", seen, g.op("Greater", keys, g.op("Sub", queries, g.constant(window))))
        return str(g.op("Where", seen, g.constant(0.0, dtype), g.constant(torch.finfo(dtype).min / 2, dtype)))

    return g.once(("hidden", window, dtype), make)


def _hidden(g: OnnxGraph, window: int, dtype: torch.dtype) -> str:
    """[B, 1, S, T] to add to scores: 0 where a token sees another, else as little as there is."""

    def make() -> str:
        total = g.op("Squeeze", g.op("Shape", "attention_mask", start=1, end=2))
        new = g.op("Squeeze", g.op("Shape", "input_ids", start=1, end=2))
        keys = g.op("Range", g.constant(0), total, g.constant(1))  # [T]
        queries = g.op("Unsqueeze", g.op("Range", g.op("Sub", total, new), total, g.constant(1)), g.constant([1]))
        seen = g.op("LessOrEqual", keys, queries)  # [S, T]
        if window:
            seen = g.op("And", seen, g.op("Greater", keys, g.op("Sub", queries, g.constant(window))))
        real = g.op("Unsqueeze", g.cast("attention_mask", torch.bool), g.constant([1, 2]))  # [B, 1, 1, T]
        least = g.constant(torch.finfo(dtype).min / 2, dtype)
        return g.op("Where", g.op("And", seen, real), g.constant(0.0, dtype), least)

    return g.once(("hidden", window, dtype), make)
