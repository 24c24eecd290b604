"""`forebay::kv_append`: write the K and V of new positions into the cache, each sequence at its own start."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def reference(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """New caches [B, Hkv, L, D] with k and v [B, Hkv, S, D] at positions start[b] .. start[b] + S - 1; any device."""
    made = (k_cache.clone(), v_cache.clone())
    for cache, new in zip(made, (k, v), strict=True):
        for b, begin in enumerate(start.tolist()):
            cache[b, :, begin : begin + new.shape[2]] = new[b]
    return made


def _fail(argument: str, problem: str) -> None:
    raise ValueError(f"kv_append: {argument} {problem}")


def check(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> None:
    """ValueError names the argument whose shape or dtype is wrong; positions are checked where they are used."""
    for cache, name in ((k_cache, "k_cache"), (v_cache, "v_cache")):
        if cache.dim() != 4:
            _fail(name, f"must be [B, Hkv, L, D], got shape {tuple(cache.shape)}")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        _fail("v_cache", f"must have B, Hkv and L of k_cache {tuple(k_cache.shape)}, got {tuple(v_cache.shape)}")
    for new, cache, name in ((k, k_cache, "k"), (v, v_cache, "v")):
        wanted = (*cache.shape[:2], k.shape[2] if k.dim() == 4 else "S", cache.shape[3])
        if new.dim() != 4 or tuple(new.shape) != wanted:
            _fail(name, f"must have shape {wanted} as the cache asks, got {tuple(new.shape)}")
        if new.dtype != cache.dtype:
            _fail(name, f"must have the cache's dtype {cache.dtype}, got {new.dtype}")
    if start.dtype != torch.int64 or start.shape != k_cache.shape[:1]:
        _fail("start", f"must be int64 of shape {tuple(k_cache.shape[:1])}, got {start.dtype} {tuple(start.shape)}")


def _append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> None:
    begins = start.tolist()
    if not begins:
        return
    length, first = k.shape[2], begins[0]
    if min(begins) < 0 or max(begins) + length > k_cache.shape[2]:
        _fail("start", f"must leave positions within 0 .. {k_cache.shape[2]}, got {begins} and {length} new")
    if begins.count(first) == len(begins):
        k_cache.narrow(2, first, length).copy_(k)
        v_cache.narrow(2, first, length).copy_(v)
    elif length == 1:
        batch = torch.arange(len(begins))
        k_cache[batch, :, start] = k[:, :, 0]
        v_cache[batch, :, start] = v[:, :, 0]
    else:
        for b, begin in enumerate(begins):
            k_cache[b].narrow(1, begin, length).copy_(k[b])
            v_cache[b].narrow(1, begin, length).copy_(v[b])


@torch.library.custom_op("forebay::kv_append", mutates_args=("k_cache", "v_cache"), device_types="cpu")
def kv_append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> None:
    """Write k [B, Hkv, S, D] and v into the caches [B, Hkv, L, D] at positions start[b] .. start[b] + S - 1.

    start is int64 [B]. Any strides. ValueError, before anything is written, where a shape, a dtype or a position is
    wrong; on fake tensors only shapes are known.
    """
    check(k_cache, v_cache, k, v, start)
    _append(k_cache, v_cache, k, v, start)


@kv_append.register_fake
def _(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> None:
    return None


def bind_kv_append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> Callable[[], None]:
    """A closure over CPU tensors that appends the present contents of k and v at the present contents of start."""
    check(k_cache, v_cache, k, v, start)
    batch = torch.arange(k_cache.shape[0])
    if k.shape[2] != 1 or k_cache.shape[0] == 0:
        return lambda: _append(k_cache, v_cache, k, v, start)
    capacity, k_row, v_row = k_cache.shape[2], k[:, :, 0], v[:, :, 0]

    def append_one() -> None:
        begins = start.tolist()
        first = begins[0]
        if min(begins) < 0 or max(begins) >= capacity:
            _fail("start", f"must leave positions within 0 .. {capacity}, got {begins} and 1 new")
        if begins.count(first) == len(begins):
            k_cache.select(2, first).copy_(k_row)
            v_cache.select(2, first).copy_(v_row)
        else:
            k_cache[batch, :, start] = k_row
            v_cache[batch, :, start] = v_row

    return append_one
