"""`forebay::kv_append`: write the K and V of new positions into the cache, each sequence at its own start.

The C++ kernel (`kv_append.cpp`) copies rows; without a compiler, or where D is not contiguous, torch does it.
"""

from __future__ import annotations

from torch import Tensor

from forebay.kernels.attention.attention.onnx import kv_append as kv_append_onnx
from forebay.kernels.cache.kv_append.cpu import bind_kv_append
from forebay.kernels.cache.kv_append.reference import reference
from forebay.kernels.cache.turned import turning
from forebay.kernels.define import define_operator, filling, on_gpu
from forebay.kernels.operator import Cost, Use, nbytes_of


def _kv_append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> None:
    """Write k [B, Hkv, S, D] and v into the caches [B, Hkv, L, D] at positions start[b] .. start[b] + S - 1.

    start is int64 [B]. Any strides. ValueError, before anything is written, where a shape, a dtype or a position is
    wrong; on fake tensors only shapes are known.
    """
    return None


def _cost(use: Use) -> Cost:
    """The new positions alone."""
    _, _, k, v, start = use.args
    return Cost(0, nbytes_of(k, v, start, *use.kwargs.values()), nbytes_of(k, v, *use.out))


KV_APPEND = define_operator(
    _kv_append,
    writes=("k_cache", "v_cache"),
    reference=reference,
    cost=_cost,
    bind={"cpu": turning(filling(bind_kv_append)), "cuda": on_gpu(f"{__package__}.gpu", "bind_kv_append")},
    layouts={"start": "dense"},
    caches=("k_cache", "v_cache"),
    takes_rotary=lambda use: use.args[2].shape[-1] % 2 == 0,
    onnx=kv_append_onnx,
)
