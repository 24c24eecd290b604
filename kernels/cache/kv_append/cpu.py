"""`forebay::kv_append` on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from torch import Tensor

from forebay.kernels.cache.kv_append.reference import check, fail
from forebay.kernels.cpu_support import native


class KvAppendArgs(ctypes.Structure):
    """Mirror of `KvAppendArgs` in kv_append.cpp; strides are in bytes."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k_cache", "v_cache", "k", "v", "start")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "length", "rows", "k_nbytes", "v_nbytes")),
        *((f"{t}_{d}", ctypes.c_int64) for t in ("k_cache", "v_cache", "k", "v") for d in ("batch", "head", "row")),
    )


def _refuse_start(k_cache: Tensor, k: Tensor, start: Tensor) -> None:
    fail("start", f"must leave positions within 0 .. {k_cache.shape[2]}, got {start.tolist()} and {k.shape[2]} new")


def _append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> None:
    """By torch."""
    begins, length = start.tolist(), k.shape[2]
    if begins and (min(begins) < 0 or max(begins) + length > k_cache.shape[2]):
        _refuse_start(k_cache, k, start)
    for b, begin in enumerate(begins):
        k_cache[b].narrow(1, begin, length).copy_(k[b])
        v_cache[b].narrow(1, begin, length).copy_(v[b])


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
        fail("start", "must be contiguous")
    args = KvAppendArgs(
        *(t.data_ptr() for t in tensors), start.data_ptr(),
        *k_cache.shape[:3], k.shape[2], k.shape[3] * k.element_size(), v.shape[3] * v.element_size(),
        *(stride * t.element_size() for t in tensors for stride in t.stride()[:3]),
    )  # fmt: skip
    return native.NativeCall("kv_append", args, (*tensors, start), refuse=lambda: _refuse_start(k_cache, k, start))
