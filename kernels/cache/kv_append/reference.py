"""The definition of `forebay::kv_append`, and the checks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """New caches [B, Hkv, L, D] with k and v [B, Hkv, S, D] at positions start[b] .. start[b] + S - 1; any device."""
    made = (k_cache.clone(), v_cache.clone())
    for cache, new in zip(made, (k, v), strict=True):
        for b, begin in enumerate(start.tolist()):
            cache[b, :, begin : begin + new.shape[2]] = new[b]
    return made


def fail(argument: str, problem: str) -> None:
    raise ValueError(f"kv_append: {argument} {problem}")


def check(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> None:
    """ValueError names the argument whose shape or dtype is wrong; positions are checked where they are used."""
    for cache, name in ((k_cache, "k_cache"), (v_cache, "v_cache")):
        if cache.dim() != 4:
            fail(name, f"must be [B, Hkv, L, D], got shape {tuple(cache.shape)}")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        fail("v_cache", f"must have B, Hkv and L of k_cache {tuple(k_cache.shape)}, got {tuple(v_cache.shape)}")
    for new, cache, name in ((k, k_cache, "k"), (v, v_cache, "v")):
        wanted = (*cache.shape[:2], k.shape[2] if k.dim() == 4 else "S", cache.shape[3])
        if new.dim() != 4 or tuple(new.shape) != wanted:
            fail(name, f"must have shape {wanted} as the cache asks, got {tuple(new.shape)}")
        if new.dtype != cache.dtype:
            fail(name, f"must have the cache's dtype {cache.dtype}, got {new.dtype}")
    if start.dtype != torch.int64 or start.shape != k_cache.shape[:1]:
        fail("start", f"must be int64 of shape {tuple(k_cache.shape[:1])}, got {start.dtype} {tuple(start.shape)}")
