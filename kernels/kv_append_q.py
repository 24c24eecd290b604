"""`forebay::kv_append_q`: write the K and V of new positions, quantised, into a cache of packed rows.

A quantised cache is uint8 [B, Hkv, L, R]: one packed row (`packing`) for each position of each KV head, groups along
the head dimension, scales and lows in fp16, R = row_nbytes(D, bits, group, CACHE_ALIGN). What writes it and what reads
it, `attention_q`, must be told the same bits and group; `packing.cache_group_size` says the usual group.

A group with NaN, infinity, or a magnitude beyond fp16's range reads back as NaN: nothing is lost in silence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forebay.kernels import kv_append, native, packing
from forebay.kernels import quantize as quantize_module
from forebay.kernels.quantized_native import CacheAppendArgs

SCALE_DTYPE = torch.float16


def pack(x: Tensor, bits: int, group: int) -> Tensor:
    """x [..., D] as packed cache rows uint8 [..., R], by plain torch on any device; NaN where a group is not held."""
    matrix = x.reshape(-1, x.shape[-1])
    parts = quantize_module.reference(matrix, bits, group, 1, SCALE_DTYPE)
    return packing.pack_rows(*parts, align=packing.CACHE_ALIGN).view(*x.shape[:-1], -1)


def unpack(cache: Tensor, head_dim: int, bits: int, group: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [..., D] of packed cache rows [..., R], by plain torch on any device."""
    parts = packing.unpack_rows(cache, head_dim, bits, group, SCALE_DTYPE)
    return quantize_module.dequantize_reference(*parts, bits, group, -1, head_dim, dtype)


def reference(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, bits: int, group: int
) -> tuple[Tensor, Tensor]:
    """New caches [B, Hkv, L, R] with k and v [B, Hkv, S, D] at positions start[b] .. start[b] + S - 1; any device."""
    return kv_append.reference(k_cache, v_cache, pack(k, bits, group), pack(v, bits, group), start)


def _fail(argument: str, problem: str) -> None:
    raise ValueError(f"kv_append_q: {argument} {problem}")


def check_format(op: str, bits: int, group: int) -> None:
    """ValueError, opened by op, unless cache rows of this format exist."""
    packing.check_format(op, bits, group)
    if group % 4:
        raise ValueError(f"{op}: group must be a multiple of 4, got {group}")


def check(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, bits: int, group: int) -> None:
    """ValueError names the argument whose shape or dtype is wrong; positions are checked where they are used."""
    check_format("kv_append_q", bits, group)
    for new, cache, name in ((k, k_cache, "k"), (v, v_cache, "v")):
        if new.dim() != 4 or new.dtype not in native.DTYPES or new.dtype != k.dtype or new.shape[:3] != k.shape[:3]:
            _fail(name, f"must be [B, Hkv, S, D] of fp32, bf16 or fp16 like k, got {new.dtype} {tuple(new.shape)}")
        wanted = (*k.shape[:2], k_cache.shape[2] if k_cache.dim() == 4 else "L",
                  packing.row_nbytes(new.shape[3], bits, group, packing.CACHE_ALIGN))  # fmt: skip
        if cache.dtype != torch.uint8 or tuple(cache.shape) != wanted:
            _fail(f"{name}_cache", f"must be uint8 {wanted}, got {cache.dtype} {tuple(cache.shape)}")
    if start.dtype != torch.int64 or start.shape != k.shape[:1]:
        _fail("start", f"must be int64 of shape {tuple(k.shape[:1])}, got {start.dtype} {tuple(start.shape)}")


def _refuse_start(k_cache: Tensor, k: Tensor, start: Tensor) -> None:
    _fail("start", f"must leave positions within 0 .. {k_cache.shape[2]}, got {start.tolist()} and {k.shape[2]} new")


def _append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, bits: int, group: int) -> None:
    """By torch, one sequence after another."""
    begins, new = start.tolist(), k.shape[2]
    if begins and (min(begins) < 0 or max(begins) + new > k_cache.shape[2]):
        _refuse_start(k_cache, k, start)
    for cache, x in ((k_cache, k), (v_cache, v)):
        rows = pack(x, bits, group)
        for b, begin in enumerate(begins):
            cache[b, :, begin : begin + new] = rows[b]


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
        return lambda: _append(k_cache, v_cache, k, v, start, bits, group)
    if not start.is_contiguous():
        _fail("start", "must be contiguous")
    args = CacheAppendArgs(
        *(t.data_ptr() for t in tensors), start.data_ptr(),
        *k_cache.shape[:3], k.shape[2], k.shape[3], v.shape[3], group,
        *(stride for t in tensors for stride in t.stride()[:3]), bits, native.DTYPES[k.dtype],
    )  # fmt: skip
    return native.NativeCall("kv_append_q", args, (*tensors, start), refuse=lambda: _refuse_start(k_cache, k, start))


@torch.library.custom_op("forebay::kv_append_q", mutates_args=("k_cache", "v_cache"), device_types="cpu")
def kv_append_q(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, bits: int, group: int) -> None:
    """Write k [B, Hkv, S, D] and v, as codes of `bits`, into the caches [B, Hkv, L, R] at start[b] .. start[b] + S - 1.

    start is int64 [B]. Any strides. ValueError, before anything is written, where a shape, a dtype or a position is
    wrong; on fake tensors only shapes are known.
    """
    bind_kv_append_q(k_cache, v_cache, k, v, start.contiguous(), bits, group)()


@kv_append_q.register_fake
def _(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, bits: int, group: int) -> None:
    check(k_cache, v_cache, k, v, start, bits, group)
