"""`forebay::kv_append`: write the K and V of new positions into the cache, each sequence at its own start.

The C++ kernel (`cpu/kv_append.cpp`) copies rows; without a compiler, or where D is not contiguous, torch does it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forebay.kernels import native


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


def _refuse_start(k_cache: Tensor, k: Tensor, start: Tensor) -> None:
    _fail("start", f"must leave positions within 0 .. {k_cache.shape[2]}, got {start.tolist()} and {k.shape[2]} new")


def _append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> None:
    """By torch."""
    begins, length = start.tolist(), k.shape[2]
    if begins and (min(begins) < 0 or max(begins) + length > k_cache.shape[2]):
        _refuse_start(k_cache, k, start)
    for b, begin in enumerate(begins):
        k_cache[b].narrow(1, begin, length).copy_(k[b])
        v_cache[b].narrow(1, begin, length).copy_(v[b])


@torch.library.custom_op("forebay::kv_append", mutates_args=("k_cache", "v_cache"), device_types="cpu")
def kv_append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> None:
    """Write k [B, Hkv, S, D] and v into the caches [B, Hkv, L, D] at positions start[b] .. start[b] + S - 1.

    start is int64 [B]. Any strides. ValueError, before anything is written, where a shape, a dtype or a position is
    wrong; on fake tensors only shapes are known.
    """
    bind_kv_append(k_cache, v_cache, k, v, start.contiguous())()


@kv_append.register_kernel("cuda")
def _(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> None:
    from forebay.kernels.gpu.kv_append import kv_append as launch

    launch(k_cache, v_cache, k, v, start)


@kv_append.register_fake
def _(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> None:
    return None


def bind_kv_append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> Callable[[], None]:
    """A closure over CPU tensors that appends the present contents of k and v at the present contents of start.

    Strides and pointers are settled here; the closure keeps the tensors alive. ValueError for a wrong shape or dtype
    here, and for a start outside the cache at the call, before anything is written.
    """
    check(k_cache, v_cache, k, v, start)
    tensors = (k_cache, v_cache, k, v)
    if native.load() is None or any(t.stride(-1) != 1 and t.shape[-1] != 1 for t in tensors):
        return lambda: _append(k_cache, v_cache, k, v, start)
    if not start.is_contiguous():
        _fail("start", "must be contiguous")
    args = native.KvAppendArgs(
        *(t.data_ptr() for t in tensors), start.data_ptr(),
        *k_cache.shape[:3], k.shape[2], k.shape[3] * k.element_size(), v.shape[3] * v.element_size(),
        *(stride * t.element_size() for t in tensors for stride in t.stride()[:3]),
    )  # fmt: skip
    return native.NativeCall("kv_append", args, (*tensors, start), refuse=lambda: _refuse_start(k_cache, k, start))
