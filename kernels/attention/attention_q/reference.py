"""The definition of `forebay::attention_q`, and the checks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.attention.attention import reference as attention_reference
from forebay.kernels.attention.chosen_rows import check_chosen
from forebay.kernels.cache.kv_append_q import reference as kv_append_q
from forebay.kernels.cpu_support import native
from forebay.kernels.formats import row_sizes


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    start: Tensor,
    scale: float,
    window: int,
    softcap: float,
    bits: int,
    group: int,
) -> Tensor:
    """Attention in float64 over the values that the packed rows stand for, on any device: -> [B, S, H, D]."""
    k, v = (kv_append_q.unpack(cache, q.shape[3], bits, group) for cache in (k_cache, v_cache))
    return attention_reference.reference(q, k, v, start, scale, window, softcap)


def fail(argument: str, problem: str) -> None:
    raise ValueError(f"attention_q: {argument} {problem}")


def check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, start: Tensor, bits: int, group: int, chosen: Tensor | None = None
) -> None:
    """ValueError names the argument whose shape or dtype is wrong."""
    kv_append_q.check_format("attention_q", bits, group)
    if q.dim() != 4 or q.dtype not in native.DTYPES:
        fail("q", f"must be [B, H, S, D] of fp32, bf16 or fp16, got {q.dtype} {tuple(q.shape)}")
    batch, heads, _, dim = q.shape
    nbytes = row_sizes.row_nbytes(dim, bits, group, row_sizes.CACHE_ALIGN)
    for cache, name in ((k_cache, "k_cache"), (v_cache, "v_cache")):
        if cache.dtype != torch.uint8 or cache.dim() != 4 or cache.shape[0] != batch or cache.shape[3] != nbytes:
            fail(name, f"must be uint8 [{batch}, Hkv, L, {nbytes}] as q asks, got {cache.dtype} {tuple(cache.shape)}")
    if k_cache.shape[1] == 0 or heads % k_cache.shape[1]:
        fail("k_cache", f"must have a number of heads that divides q's {heads}, got {k_cache.shape[1]}")
    if v_cache.shape != k_cache.shape:
        fail("v_cache", f"must have k_cache's shape {tuple(k_cache.shape)}, got {tuple(v_cache.shape)}")
    if start.dtype != torch.int64 or start.shape != (batch,):
        fail("start", f"must be int64 of shape {(batch,)}, got {start.dtype} {tuple(start.shape)}")
    if chosen is not None:
        check_chosen("attention_q", q, chosen)


def refuse_start(q: Tensor, k_cache: Tensor, start: Tensor) -> None:
    most = k_cache.shape[2]
    fail("start", f"must leave positions within 0 .. {most}, got {start.tolist()} and {q.shape[2]} queries")
