"""`forebay::sparse_attention` on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from forebay.kernels.attention.attention.reference import refuse_start
from forebay.kernels.attention.scoring import Scoring
from forebay.kernels.attention.sparse_attention.reference import check, fail, reference
from forebay.kernels.cpu_support import native


class SparseAttentionArgs(ctypes.Structure):
    """Mirror of `SparseAttentionArgs` in sparse_attention.cpp; cache strides in bytes, the others in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "start", "out")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "length", "head_dim", "group")),
        *((name, ctypes.c_int64) for name in ("q_batch", "q_head")),
        *((f"{t}_{d}", ctypes.c_int64) for t in "kv" for d in ("batch", "head", "row")),
        *((name, ctypes.c_int64) for name in ("out_batch", "out_head", "window")),
        ("kept", ctypes.c_double),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_int32) for name in ("bits", "dtype")),
    )


# Stack per thread of the C++ kernel: 64 unpacked positions, one more, and a result.
NATIVE_NBYTES = 4 * (64 * 256 + 256 + 1024)


def scratch_floats(heads: int, kv_heads: int, length: int, head_dim: int) -> int:
    """Return the scratch of a task of the C++ kernel, in floats: scores of a KV head's queries, as much as of one
    beside them, and the queries."""
    group = heads // kv_heads
    return (group + 1) * (length // 16 + 1) * 16 + -(-group * head_dim // 16) * 16


def _has_kernel(head_dim: int, bits: int) -> bool:
    library = native.load()
    return library is not None and head_dim <= (
        library.forebay_cache_max_head_dim() if bits else library.forebay_attention_max_head_dim())


def workspace_nbytes(
    batch: int, heads: int, kv_heads: int, length: int, head_dim: int, dtype: torch.dtype, bits: int
) -> int:
    """Upper bound, in bytes, of what a call takes beside its arguments, for the kernel present here."""
    if _has_kernel(head_dim, bits):
        each = 4 * scratch_floats(heads, kv_heads, length, head_dim) + NATIVE_NBYTES
        return torch.get_num_threads() * each
    # Of one sequence: keys and values in fp32, unpacked by way of as much again; each query's chosen values and their
    # indices; scores, weights and orders; and all results.
    unpacked = 2 * kv_heads * length * head_dim * (dtype.itemsize + 16)
    chosen = heads * length * (3 * 4 * head_dim + 8 * head_dim)
    return unpacked + chosen + 48 * heads * length + 16 * batch * heads * head_dim + (1 << 20)


def bind_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, scoring: Scoring, kept: float, bits: int, group: int, out: Tensor
) -> Callable[[], None]:
    """A closure over CPU tensors that fills out [B, 1, H, D] from their present contents, start's too.

    Strides and pointers are settled here, the closure keeps the tensors alive. ValueError for a wrong shape or dtype
    here, and for a start outside the cache at the call, before anything is written.
    """
    check(q, k, v, start, kept, bits, group)
    batch, heads, _, dim = q.shape
    if out.shape != (batch, 1, heads, dim) or out.dtype != q.dtype:
        fail("out", f"must be {(batch, 1, heads, dim)} of {q.dtype}, got {tuple(out.shape)} of {out.dtype}")
    tensors = (q, k, v, start, out)
    for tensor, name in zip(tensors, ("q", "k", "v", "start", "out"), strict=True):
        if tensor.device.type != "cpu":
            fail(name, f"must be on the CPU, got {tensor.device}")
    plain = all(t.stride(-1) == 1 or t.shape[-1] <= 1 for t in (q, k, v, out))
    if not plain or not _has_kernel(dim, bits) or q.numel() == 0:
        return lambda: _by_torch(q, k, v, start, scoring, kept, bits, group, out)
    if not start.is_contiguous():
        fail("start", "must be contiguous")
    args = SparseAttentionArgs(
        *(t.data_ptr() for t in tensors), batch, heads, k.shape[1], k.shape[2], dim, group, *q.stride()[:2],
        *(stride * t.element_size() for t in (k, v) for stride in t.stride()[:3]), out.stride(0), out.stride(2),
        scoring.window, kept, scoring.scale, scoring.softcap, bits, native.DTYPES[q.dtype],
    )  # fmt: skip
    floats = torch.get_num_threads() * scratch_floats(heads, k.shape[1], k.shape[2], dim)
    return native.NativeCall("sparse_attention", args, tensors, floats, lambda: refuse_start(q, k, start))


def _by_torch(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, scoring: Scoring, kept: float, bits: int, group: int, out: Tensor
) -> None:
    begins = start.tolist()
    if begins and (min(begins) < 0 or max(begins) >= k.shape[2]):
        refuse_start(q, k, start)
    out.copy_(reference(q, k, v, start, scoring, kept, bits, group, torch.float32))
