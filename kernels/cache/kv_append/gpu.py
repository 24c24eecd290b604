"""`forebay::kv_append` in Triton: K and V of new positions into the cache by one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.gpu_support.arguments import check_device, check_tensor, fail
from forebay.kernels.gpu_support.launches import bound, kernel_call
from forebay.kernels.positions.rotary.gpu import Turned, turn_heads

# Elements of a token that one program copies, of K and of V each: 16 heads of D = 128.
TILE = 2048


@triton.jit
def kv_append_kernel(
    k_ptr, v_ptr, start_ptr, k_cache_ptr, v_cache_ptr, queries, heads, capacity, k_dim, v_dim,
    kb, kh, ks, vb, vh, vs, kcb, kch, kcl, vcb, vch, vcl,
    HEADS: tl.constexpr, D: tl.constexpr,
    q_ptr=None, turned_ptr=None, cos_ptr=None, sin_ptr=None, q_heads=0,
    qb=0, qh=0, qs=0, ob=0, oh=0, os=0, cb=0, cs=0, nb=0, ns=0, TURNED: tl.constexpr = False, K_DIM: tl.constexpr = 0,
):  # fmt: skip
    """Program (token, block of heads); a token whose position is outside the cache is left out.

    TURNED: keys are turned on their way. Programs after those of keys and values turn queries.
    """
    token = tl.program_id(0)
    b = (token // queries).to(tl.int64)
    s = (token % queries).to(tl.int64)
    position = tl.load(start_ptr + b) + s
    block = tl.program_id(1)
    if TURNED:
        blocks = tl.cdiv(heads, HEADS)
        cos_ptr += b * cb + s * cs
        sin_ptr += b * nb + s * ns
        if block >= blocks:
            first = ((block - blocks) * HEADS).to(tl.int64)
            turn_heads(q_ptr + b * qb + s * qs + first * qh, qh, turned_ptr + b * ob + s * os + first * oh, oh,
                       cos_ptr, sin_ptr, q_heads - first, K_DIM, D // 2, HEADS)  # fmt: skip
            heads = 0
    present = tl.where((position >= 0) & (position < capacity), heads, 0)
    head = (block * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    d = tl.arange(0, D)[None, :]
    if TURNED:
        first = (block * HEADS).to(tl.int64)
        turn_heads(k_ptr + b * kb + s * ks + first * kh, kh, k_cache_ptr + b * kcb + position * kcl + first * kch, kch,
                   cos_ptr, sin_ptr, present - first, K_DIM, D // 2, HEADS)  # fmt: skip
    else:
        k_used = (head < present) & (d < k_dim)
        k = tl.load(k_ptr + b * kb + s * ks + head * kh + d, mask=k_used)
        tl.store(k_cache_ptr + b * kcb + position * kcl + head * kch + d, k, mask=k_used)
    v_used = (head < present) & (d < v_dim)
    v = tl.load(v_ptr + b * vb + s * vs + head * vh + d, mask=v_used)
    tl.store(v_cache_ptr + b * vcb + position * vcl + head * vch + d, v, mask=v_used)


def tile(heads: int, dim: int) -> tuple[int, int, int]:
    """(dim, heads, warps) of one program: 512 elements a warp at most."""
    wide = triton.next_power_of_2(dim)
    block = min(triton.next_power_of_2(heads), max(1, TILE // wide))
    return wide, block, min(4, max(1, block * wide // 256))


def check_cache(op: str, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> None:
    """New k, v [B, Hkv, S, D] suit the caches [B, Hkv, L, D] in all but the last dimension, and start is int64 [B]."""
    check_tensor(op, "k_cache", k_cache)
    for tensor, name in ((k_cache, "k_cache"), (k, "k"), (v, "v")):
        if tensor.dim() != 4:
            fail(op, name, f"must have four dimensions, got shape {tuple(tensor.shape)}")
    batch, heads, queries, dim = k.shape
    capacity = k_cache.shape[2]
    for tensor, name, shape in (
        (k, "k", (batch, heads, queries, dim)),
        (v, "v", (batch, heads, queries, v.shape[3])),
        (k_cache, "k_cache", (batch, heads, capacity, dim)),
        (v_cache, "v_cache", (batch, heads, capacity, v.shape[3])),
    ):
        check_tensor(op, name, tensor, dtype=k_cache.dtype, device=k_cache.device, shape=shape)
    check_device(op, "start", start, k_cache.device)
    check_tensor(op, "start", start, dtype=torch.int64, shape=(batch,))


def bind_kv_append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, *out: Tensor, **tables: Tensor
) -> Callable[[], None]:
    """kv_append as a call without arguments, on the tensors' contents at each call; the checks are made here.

    With q, cos and sin the keys are turned by these tables on their way, and so is q, into out.
    """
    check_cache("kv_append", k_cache, v_cache, k, v, start)
    if k.numel() + v.numel() == 0:
        return lambda: None
    batch, heads, queries, dim = k.shape
    wide, block, warps = tile(heads, max(dim, v.shape[3]))
    turned, blocks = dict[str, Any](), triton.cdiv(heads, block)
    if tables:
        turned = Turned(**tables, out=out[0]).arguments("kv_append", k) | {"K_DIM": dim}
        blocks += triton.cdiv(tables["q"].shape[1], block)
    return bound(kernel_call(
        kv_append_kernel, (batch * queries, blocks),
        k, v, start, k_cache, v_cache, queries, heads, k_cache.shape[2], dim, v.shape[3],
        *k.stride()[:3], *v.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3],
        HEADS=block, D=wide, num_warps=warps, **turned,
    ))  # fmt: skip
