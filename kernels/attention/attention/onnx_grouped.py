"""onnxruntime's GroupQueryAttention, with as much of what stands before it as it does itself."""

from __future__ import annotations

from typing import Any

import torch

from forebay.kernels.attention.scoring import Scoring
from forebay.kernels.onnx_meaning import MICROSOFT, TO_THE_END, OnnxGraph, OnnxValue


def grouped(
    g: OnnxGraph, q: OnnxValue, past: tuple[str, str], new: tuple[str, str], kv_heads: int, scoring: Scoring
) -> tuple[str, str, str]:
    """q [B, H, S, D] over past keys and values [B, Hkv, P, D] and new ones -> [B, S, H, D], and both behind the step.
    The operator turns queries and keys itself where it can, and takes one operand where they and the values are cut
    from one."""
    heads, width = q.shape[1] or 1, q.shape[3] or 1
    how: dict[str, Any] = {"num_heads": heads, "kv_num_heads": kv_heads, "scale": scoring.scale}
    if scoring.softcap:
        how["softcap"] = scoring.softcap
    if scoring.window:
        how["local_window_size"] = scoring.window
    operands, tables = (str(q), *new), _turned_alike(g, q, new[0])
    if tables is not None:
        operands, how["do_rotary"] = (*tables[:2], new[1]), 1
    rows = [g.op("Reshape", g.op("Transpose", t, perm=[0, 2, 1, 3]), g.constant([0, 0, -1])) for t in operands]
    whole = g.cut_from(rows, [n * width for n in (heads, kv_heads, kv_heads)])
    if whole is not None:
        rows = [whole, "", ""]
    out, present_k, present_v = g.op(
        "GroupQueryAttention", *rows, *past, _lengths(g), _total(g), *(tables or ())[2:], outputs=3, domain=MICROSOFT,
        **how)
    found = g.op("Reshape", OnnxValue(out, q.dtype, (None, None, None)), g.constant([0, 0, heads, width]))
    return found, present_k, present_v


def _turned_alike(g: OnnxGraph, q: OnnxValue, k: str) -> tuple[str, str, OnnxValue, OnnxValue] | None:
    """Queries and keys before both are turned by the same tables, which the operator takes: a multiple of 8 angles, of
    heads whose size is a multiple of 16. None for others."""
    of_q, of_k = _before_turning(g, q), _before_turning(g, k)
    if of_q is None or of_k is None or of_q[1:] != of_k[1:]:
        return None
    query, cos, sin = of_q
    suits = (q.shape[3] or 1) % 16 == 0 and (cos.shape[1] or 1) % 8 == 0 and cos.dtype == q.dtype
    return (query, of_k[0], cos, sin) if suits else None


def _before_turning(g: OnnxGraph, value: str) -> tuple[str, OnnxValue, OnnxValue] | None:
    """Return `value` [B, H, S, D] before the rotation of each head, whole or in its first dimensions, and by which
    cosines and sines [positions, angles]."""
    parts = g.source(value, "Concat")
    if parts is None:
        return g.turned(value)
    first = g.turned(parts[0][0]) if len(parts[0]) == 2 and parts[1]["axis"] in (-1, 3) else None
    if first is None:
        return None
    x, cos, sin = first
    cuts = [cut[0] for part in (x, parts[0][1]) if (cut := g.source(part, "Slice")) is not None]
    bounds = [[g.numbers(bound) for bound in cut[1:]] for cut in cuts]
    at = 2 * (cos.shape[1] or 0)
    whole = len({cut[0] for cut in cuts}) == 1 and any(
        bounds == [[[0], [at], [axis], [1]], [[at], [TO_THE_END], [axis], [1]]] for axis in (-1, 3))
    return (cuts[0][0], cos, sin) if whole else None


def _lengths(g: OnnxGraph) -> str:
    """int32 [B]: the index of each sequence's last token."""
    return g.once("lengths", lambda: g.cast(g.op("Sub", g.op(
        "ReduceSum", "attention_mask", g.constant([1]), keepdims=0), g.constant(1)), torch.int32))


def _total(g: OnnxGraph) -> str:
    """int32: the length of the longest sequence."""
    return g.once("total", lambda: g.cast(g.op("Squeeze", g.op("Shape", "attention_mask", start=1, end=2)),
                                          torch.int32))
