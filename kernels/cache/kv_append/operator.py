"""`forebay::kv_append`: write the K and V of new positions into the cache, each sequence at its own start.

The C++ kernel (`kv_append.cpp`) copies rows; without a compiler, or where D is not contiguous, torch does it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.attention.attention.onnx import kv_append as kv_append_onnx
from forebay.kernels.cache.kv_append.cpu import bind_kv_append
from forebay.kernels.cache.kv_append.reference import reference
from forebay.kernels.operator import Call, Cost, Operator, Use, nbytes_of


@torch.library.custom_op("forebay::kv_append", mutates_args=("k_cache", "v_cache"), device_types="cpu")
def kv_append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> None:
    """Write k [B, Hkv, S, D] and v into the caches [B, Hkv, L, D] at positions start[b] .. start[b] + S - 1.

    start is int64 [B]. Any strides. ValueError, before anything is written, where a shape, a dtype or a position is
    wrong; on fake tensors only shapes are known.
    """
    bind_kv_append(k_cache, v_cache, k, v, start.contiguous())()


@kv_append.register_kernel("cuda")
def _(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> None:
    from forebay.kernels.cache.kv_append.gpu import kv_append as launch

    launch(k_cache, v_cache, k, v, start)


@kv_append.register_fake
def _(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> None:
    return None


def _cost(use: Use) -> Cost:
    """The new positions alone."""
    _, _, k, v, start = use.args
    return Cost(0, nbytes_of(k, v, start), nbytes_of(k, v))


def _bind_cuda(use: Use) -> Call:
    from forebay.kernels.cache.kv_append.gpu import bind_kv_append as bind

    return bind(*use.args)


KV_APPEND = Operator(
    torch.ops.forebay.kv_append.default,
    reference,
    _cost,
    bind={"cpu": lambda use: bind_kv_append(*use.args), "cuda": _bind_cuda},
    layouts={"start": "dense"},
    caches=("k_cache", "v_cache"),
    onnx=kv_append_onnx,
)
