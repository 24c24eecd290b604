"""`forebay::attention_q` on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from forebay.kernels.attention.attention import cpu as attention_cpu
from forebay.kernels.attention.attention_q.reference import check, fail, refuse_start
from forebay.kernels.attention.chosen_rows import attend_chosen
from forebay.kernels.attention.scoring import Scoring
from forebay.kernels.cache.kv_append_q import reference as kv_append_q
from forebay.kernels.cpu_support import native


class CacheAttentionArgs(ctypes.Structure):
    """Mirror of `CacheAttentionArgs` in attention_q.cpp; cache strides in bytes, the others in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k_cache", "v_cache", "start", "out")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "queries", "length", "head_dim", "group")),
        *((f"{t}_{d}", ctypes.c_int64) for t in "qkv" for d in ("batch", "head", "row")),
        *((name, ctypes.c_int64) for name in ("out_batch", "out_row", "out_head", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_int32) for name in ("bits", "dtype")),
    )


def stack_nbytes(head_dim: int) -> int:
    """Bytes of a thread's stack in the C++ kernel: 32 query rows and their results, 32 x 64 scores, and 64 unpacked
    positions."""
    width = max(256, head_dim + -head_dim % 16)
    return 4 * (2 * 32 * width + 32 * 64 + 64 * width)


def workspace_nbytes(
    batch: int, heads: int, kv_heads: int, queries: int, length: int, head_dim: int, dtype: torch.dtype, softcap: float
) -> int:
    """Upper bound, in bytes, of what a call takes beside its arguments, for the kernel present here."""
    library = native.load()
    if library is not None and head_dim <= library.forebay_cache_max_head_dim():
        return stack_nbytes(head_dim) * torch.get_num_threads()
    return unpacked_nbytes(batch, heads, kv_heads, queries, length, head_dim, dtype, softcap)


def unpacked_nbytes(
    batch: int, heads: int, kv_heads: int, queries: int, length: int, head_dim: int, dtype: torch.dtype, softcap: float
) -> int:
    """The same of `attend_unpacked`, whose `unpack` takes at most 16 bytes an element beside its result."""
    unpacked = 2 * batch * kv_heads * length * head_dim * (dtype.itemsize + 16)
    plain = attention_cpu.workspace_nbytes(batch, heads, kv_heads, queries, length, head_dim, dtype, softcap)
    return unpacked + plain


def attend_unpacked(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, start: Tensor, scoring: Scoring, unpack: Callable[[Tensor], Tensor],
    out: Tensor,
) -> None:
    """By torch; `unpack` makes values [B, Hkv, L, D] of q's dtype of rows [B, Hkv, L, R]."""
    begins = start.tolist()
    if begins and (min(begins) < 0 or max(begins) + q.shape[2] > k_cache.shape[2]):
        refuse_start(q, k_cache, start)
    end = max(begins, default=0) + q.shape[2]
    k, v = (unpack(cache[:, :, :end]) for cache in (k_cache, v_cache))
    attention_cpu.attention_out(q, k, v, start.contiguous(), *scoring, out)


def bind_attention_q(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    start: Tensor,
    scoring: Scoring,
    bits: int,
    group: int,
    out: Tensor,
    chosen: Tensor | None = None,
) -> Callable[[], None]:
    """A closure over CPU tensors that fills out [B, S, H, D] from their present contents, start's too.

    Strides and pointers are settled here, the closure keeps the tensors alive. ValueError for a wrong shape or dtype
    here, and for a start outside the cache at the call, before anything is written.
    """
    check(q, k_cache, v_cache, start, bits, group, chosen)
    batch, heads, queries, dim = q.shape
    if out.shape != (batch, queries, heads, dim) or out.dtype != q.dtype:
        fail("out", f"must be {(batch, queries, heads, dim)} of {q.dtype}, got {tuple(out.shape)} of {out.dtype}")
    tensors = (q, k_cache, v_cache, start, out)
    for tensor, name in zip(tensors, ("q", "k_cache", "v_cache", "start", "out"), strict=True):
        if tensor.device.type != "cpu":
            fail(name, f"must be on the CPU, got {tensor.device}")
    if chosen is not None:
        if scoring.window:
            fail("chosen", "leaves no place for a window")
        return attend_chosen(q, k_cache, v_cache, start, chosen, out, lambda q, k, v, start, out: bind_attention_q(
            q, k, v, start, scoring, bits, group, out))
    library = native.load()
    plain = all(t.stride(-1) == 1 or t.shape[-1] <= 1 for t in (q, k_cache, v_cache, out))
    if library is None or not plain or dim > library.forebay_cache_max_head_dim() or q.numel() == 0:
        return lambda: attend_unpacked(q, k_cache, v_cache, start, scoring, lambda rows: kv_append_q.unpack(
            rows, dim, bits, group, q.dtype), out)
    if not start.is_contiguous():
        fail("start", "must be contiguous")
    args = CacheAttentionArgs(
        *(t.data_ptr() for t in tensors), batch, heads, k_cache.shape[1], queries, k_cache.shape[2], dim, group,
        *(stride for t in (q, k_cache, v_cache, out) for stride in t.stride()[:3]),
        scoring.window, scoring.scale, scoring.softcap, bits, native.DTYPES[q.dtype],
    )  # fmt: skip
    return native.NativeCall("attention_q", args, tensors, refuse=lambda: refuse_start(q, k_cache, start))
