"""`forebay::kv_append_q` on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from torch import Tensor

from forebay.kernels.cache.kv_append_q.reference import check, fail, pack, positions_of, put
from forebay.kernels.cpu_support import native


class CacheAppendArgs(ctypes.Structure):
    """Mirror of `CacheAppendArgs` in kv_append_q.cpp; cache strides in bytes, the others in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k_cache", "v_cache", "k", "v", "start")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "length", "rows", "k_dim", "v_dim", "group")),
        *((f"{t}_{d}", ctypes.c_int64) for t in ("k_cache", "v_cache", "k", "v") for d in ("batch", "head", "row")),
        *((name, ctypes.c_int32) for name in ("bits", "dtype", "each")),
    )


def _refuse_start(k_cache: Tensor, k: Tensor, start: Tensor) -> None:
    fail("start", f"must leave positions within 0 .. {k_cache.shape[2]}, got {start.tolist()} and {k.shape[2]} new")


def append_rows(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, pack: Callable[[Tensor], Tensor]
) -> None:
    """By torch, one sequence after another; `pack` makes rows [B, Hkv, S, R] of values [B, Hkv, S, D]."""
    places = positions_of(start, k.shape[2])
    if places.numel() and (places.min() < 0 or places.max() >= k_cache.shape[2]):
        _refuse_start(k_cache, k, start)
    for cache, x in ((k_cache, k), (v_cache, v)):
        put(cache, pack(x), places)


def bind_kv_append_q(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, bits: int, group: int
) -> Callable[[], None]:
    """A closure over CPU tensors that appends the present contents of k and v at the present contents of start.

    Strides and pointers are settled here; the closure keeps the tensors alive. ValueError for a wrong shape or dtype
    here, and for a start outside the cache at the call, before anything is written.
    """
    check(k_cache, v_cache, k, v, start, bits, group)
    tensors = (k_cache, v_cache, k, v)
    library = native.load()
    plain = all(t.stride(-1) == 1 or t.shape[-1] <= 1 for t in tensors)
    most = 0 if library is None else library.forebay_cache_max_head_dim()
    if not plain or max(k.shape[3], v.shape[3]) > most or k.numel() == 0:
        return lambda: append_rows(k_cache, v_cache, k, v, start, lambda x: pack(x, bits, group))
    if not start.is_contiguous():
        fail("start", "must be contiguous")
    args = CacheAppendArgs(
        *(t.data_ptr() for t in tensors), start.data_ptr(),
        *k_cache.shape[:3], k.shape[2], k.shape[3], v.shape[3], group,
        *(stride for t in tensors for stride in t.stride()[:3]), bits, native.DTYPES[k.dtype], start.dim() - 1,
    )  # fmt: skip
    return native.NativeCall("kv_append_q", args, (*tensors, start), refuse=lambda: _refuse_start(k_cache, k, start))
