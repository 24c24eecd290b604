"""`forebay::attention_q`: `forebay::attention` over a cache of packed rows (see `kv_append_q` for their layout).

The C++ kernel (`cpu/quantized_cache.cpp`) unpacks 64 positions at a time on its stack, once per 32 query rows; memory
holds packed rows only. Keys and values stay rotated: it is the queries, and once the result, that the kernel rotates.
Without a compiler the visible part of the cache is unpacked by torch. On a GPU it is Triton's kernels of `attention`
that read packed rows, in registers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forebay.kernels import attention, kv_append_q, native, packing
from forebay.kernels.quantized_native import CacheAttentionArgs

# Stack per thread of the C++ kernel: 32 query rows and their results of at most 256 floats, 32 x 64 scores, and 64
# unpacked positions.
NATIVE_NBYTES = 4 * (2 * 32 * 256 + 32 * 64 + 64 * 256)


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
    return attention.reference(q, k, v, start, scale, window, softcap)


def workspace_nbytes(
    batch: int, heads: int, kv_heads: int, queries: int, length: int, head_dim: int, dtype: torch.dtype, softcap: float
) -> int:
    """Upper bound, in bytes, of what a call takes beside its arguments, for the kernel present here."""
    library = native.load()
    if library is not None and head_dim <= library.forebay_cache_max_head_dim():
        return NATIVE_NBYTES * torch.get_num_threads()
    unpacked = 2 * batch * kv_heads * length * head_dim * (dtype.itemsize + 16)
    plain = attention.workspace_nbytes(batch, heads, kv_heads, queries, length, head_dim, dtype, softcap)
    return unpacked + plain


def _fail(argument: str, problem: str) -> None:
    raise ValueError(f"attention_q: {argument} {problem}")


def check(q: Tensor, k_cache: Tensor, v_cache: Tensor, start: Tensor, bits: int, group: int) -> None:
    """ValueError names the argument whose shape or dtype is wrong."""
    kv_append_q.check_format("attention_q", bits, group)
    if q.dim() != 4 or q.dtype not in native.DTYPES:
        _fail("q", f"must be [B, H, S, D] of fp32, bf16 or fp16, got {q.dtype} {tuple(q.shape)}")
    batch, heads, _, dim = q.shape
    nbytes = packing.row_nbytes(dim, bits, group, packing.CACHE_ALIGN)
    for cache, name in ((k_cache, "k_cache"), (v_cache, "v_cache")):
        if cache.dtype != torch.uint8 or cache.dim() != 4 or cache.shape[0] != batch or cache.shape[3] != nbytes:
            _fail(name, f"must be uint8 [{batch}, Hkv, L, {nbytes}] as q asks, got {cache.dtype} {tuple(cache.shape)}")
    if k_cache.shape[1] == 0 or heads % k_cache.shape[1]:
        _fail("k_cache", f"must have a number of heads that divides q's {heads}, got {k_cache.shape[1]}")
    if v_cache.shape != k_cache.shape:
        _fail("v_cache", f"must have k_cache's shape {tuple(k_cache.shape)}, got {tuple(v_cache.shape)}")
    if start.dtype != torch.int64 or start.shape != (batch,):
        _fail("start", f"must be int64 of shape {(batch,)}, got {start.dtype} {tuple(start.shape)}")


def _refuse_start(q: Tensor, k_cache: Tensor, start: Tensor) -> None:
    most = k_cache.shape[2]
    _fail("start", f"must leave positions within 0 .. {most}, got {start.tolist()} and {q.shape[2]} queries")


def _torch_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    start: Tensor,
    scale: float,
    window: int,
    softcap: float,
    bits: int,
    group: int,
    out: Tensor,
) -> None:
    begins = start.tolist()
    if begins and (min(begins) < 0 or max(begins) + q.shape[2] > k_cache.shape[2]):
        _refuse_start(q, k_cache, start)
    end = max(begins, default=0) + q.shape[2]
    k, v = (kv_append_q.unpack(cache[:, :, :end], q.shape[3], bits, group, q.dtype) for cache in (k_cache, v_cache))
    attention.attention_out(q, k, v, start.contiguous(), scale, window, softcap, out)


def bind_attention_q(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    start: Tensor,
    scale: float,
    window: int,
    softcap: float,
    bits: int,
    group: int,
    out: Tensor,
) -> Callable[[], None]:
    """A closure over CPU tensors that fills out [B, S, H, D] from their present contents, start's too.

    Strides and pointers are settled here, the closure keeps the tensors alive. ValueError for a wrong shape or dtype
    here, and for a start outside the cache at the call, before anything is written.
    """
    check(q, k_cache, v_cache, start, bits, group)
    batch, heads, queries, dim = q.shape
    if out.shape != (batch, queries, heads, dim) or out.dtype != q.dtype:
        _fail("out", f"must be {(batch, queries, heads, dim)} of {q.dtype}, got {tuple(out.shape)} of {out.dtype}")
    tensors = (q, k_cache, v_cache, start, out)
    for tensor, name in zip(tensors, ("q", "k_cache", "v_cache", "start", "out"), strict=True):
        if tensor.device.type != "cpu":
            _fail(name, f"must be on the CPU, got {tensor.device}")
    library = native.load()
    plain = all(t.stride(-1) == 1 or t.shape[-1] <= 1 for t in (q, k_cache, v_cache, out))
    if library is None or not plain or dim > library.forebay_cache_max_head_dim() or q.numel() == 0:
        return lambda: _torch_attention(q, k_cache, v_cache, start, scale, window, softcap, bits, group, out)
    if not start.is_contiguous():
        _fail("start", "must be contiguous")
    args = CacheAttentionArgs(
        *(t.data_ptr() for t in tensors), batch, heads, k_cache.shape[1], queries, k_cache.shape[2], dim, group,
        *(stride for t in (q, k_cache, v_cache, out) for stride in t.stride()[:3]),
        window, scale, softcap, bits, native.DTYPES[q.dtype],
    )  # fmt: skip
    return native.NativeCall("attention_q", args, tensors, refuse=lambda: _refuse_start(q, k_cache, start))


@torch.library.custom_op("forebay::attention_q", mutates_args=(), device_types="cpu")
def attention_q(
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
    """q [B, H, S, D], packed caches uint8 [B, Hkv, L, R], start int64 [B] -> [B, S, H, D]; window 0, softcap 0: none.

    q and caches may be strided. ValueError names the argument that is wrong.
    """
    check(q, k_cache, v_cache, start, bits, group)
    batch, heads, queries, dim = q.shape
    out = q.new_empty(batch, queries, heads, dim)
    bind_attention_q(q, k_cache, v_cache, start.contiguous(), scale, window, softcap, bits, group, out)()
    return out


@attention_q.register_kernel("cuda")
def _(
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
    from forebay.kernels.gpu.attention_q import attention_q as launch

    check(q, k_cache, v_cache, start, bits, group)
    batch, heads, queries, dim = q.shape
    out = q.new_empty(batch, queries, heads, dim)
    launch(q, k_cache, v_cache, start, scale, window, softcap, bits, group, out)
    return out


@attention_q.register_fake
def _(
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
    batch, heads, queries, dim = q.shape
    return q.new_empty(batch, queries, heads, dim)
