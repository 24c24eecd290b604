"""`forebay::rotary_append`, `rotary_append_paged` and `kv_append_paged`: new positions into the cache.

The first two turn queries and keys as `forebay::rotary` does and store keys and values, in one pass on a GPU; the third
only stores. A paged cache (`paged.BlockLayout`) may be quantised, with the codes of `forebay::quantize`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels import kv_append, paged, rotary
from forebay.kernels.paged import BlockLayout


def reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, start: Tensor, k_cache: Tensor, v_cache: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(q turned, new k_cache, new v_cache) by plain torch, on any device."""
    turned = rotary.reference(k, cos, sin)
    return rotary.reference(q, cos, sin), *kv_append.reference(k_cache, v_cache, turned, v, start)


def paged_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pool: Tensor, layout: BlockLayout
) -> tuple[Tensor, Tensor]:
    """(q turned, new pool) by plain torch, on any device."""
    made = pool.clone()
    _write(made, layout, slots, rotary.reference(k, cos, sin), v)
    return rotary.reference(q, cos, sin), made


def _write(pool: Tensor, layout: BlockLayout, slots: Tensor, k: Tensor, v: Tensor) -> None:
    slots = torch.where(slots < pool.shape[0] * layout.tokens, slots, -1)
    paged.write(pool, layout, slots.flatten(), k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1))


def _fail(op: str, argument: str, problem: str) -> None:
    raise ValueError(f"{op}: {argument} {problem}")


def check_queries(op: str, q: Tensor, k: Tensor) -> None:
    """ValueError unless q [B, H, S, D] suits k [B, Hkv, S, D]."""
    if q.dim() != 4 or k.dim() != 4 or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        _fail(op, "q", f"must be [B, H, S, D] with B, S and D of k {tuple(k.shape)}, got shape {tuple(q.shape)}")
    if q.dtype != k.dtype:
        _fail(op, "q", f"must be of k's dtype {k.dtype}, got {q.dtype}")


def check_paged(op: str, k: Tensor, v: Tensor, slots: Tensor, pool: Tensor, layout: BlockLayout) -> None:
    """ValueError names the argument whose shape or dtype is wrong."""
    paged.check_pool(op, pool, layout)
    wanted = (k.shape[0], layout.kv_heads, k.shape[2] if k.dim() == 4 else "S", layout.head_dim)
    for tensor, name in ((k, "k"), (v, "v")):
        if tuple(tensor.shape) != wanted or tensor.dtype != layout.dtype:
            _fail(op, name, f"must be {wanted} of {layout.dtype}, got {tensor.dtype} {tuple(tensor.shape)}")
    if slots.dtype != torch.int64 or tuple(slots.shape) != (k.shape[0], k.shape[2]):
        _fail(op, "slots", f"must be int64 {(k.shape[0], k.shape[2])}, got {slots.dtype} {tuple(slots.shape)}")


def _layout(k: Tensor, block_tokens: int, format: str, group_size: int) -> BlockLayout:
    return BlockLayout(block_tokens, k.shape[1], k.shape[3], format, k.dtype, group_size)


@torch.library.custom_op("forebay::rotary_append", mutates_args=("k_cache", "v_cache"), device_types="cpu")
def rotary_append(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, start: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """q [B, H, S, D] turned; k turned and v [B, Hkv, S, D] go to positions start[b] + s of the caches [B, Hkv, L, D].

    cos and sin [B or 1, S, D], start int64 [B]. ValueError names op and argument, of rotary or kv_append where that is
    the one concerned, before anything is written.
    """
    check_queries("rotary_append", q, k)
    kv_append.check(k_cache, v_cache, k, v, start)
    out = rotary.rotary(q, cos, sin)
    kv_append.kv_append(k_cache, v_cache, rotary.rotary(k, cos, sin), v, start)
    return out


@rotary_append.register_kernel("cuda")
def _(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, start: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    from forebay.kernels.gpu.rotary_append import rotary_append as launch

    out = torch.empty_like(q)
    launch(q, k, v, cos, sin, start, k_cache, v_cache, out)
    return out


@rotary_append.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, start: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("forebay::rotary_append_paged", mutates_args=("pool",), device_types="cpu")
def rotary_append_paged(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pool: Tensor,
    block_tokens: int, format: str, group_size: int,
) -> Tensor:  # fmt: skip
    """q [B, H, S, D] turned; k turned and v [B, Hkv, S, D] go to slots int64 [B, S] of the pool uint8 [blocks, record].

    block_tokens, format and group_size are those of `paged.BlockLayout`, dtype and sizes k's. A slot below 0 or beyond
    the pool is left out. ValueError names the argument that is wrong.
    """
    check_queries("rotary_append_paged", q, k)
    layout = _layout(k, block_tokens, format, group_size)
    check_paged("rotary_append_paged", k, v, slots, pool, layout)
    out = rotary.rotary(q, cos, sin)
    _write(pool, layout, slots, rotary.rotary(k, cos, sin), v)
    return out


@rotary_append_paged.register_kernel("cuda")
def _(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pool: Tensor,
    block_tokens: int, format: str, group_size: int,
) -> Tensor:  # fmt: skip
    from forebay.kernels.gpu.rotary_append import rotary_append_paged as launch

    check_queries("rotary_append_paged", q, k)
    out = torch.empty_like(q)
    launch(q, k, v, cos, sin, slots, pool, _layout(k, block_tokens, format, group_size), out)
    return out


@rotary_append_paged.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pool: Tensor,
    block_tokens: int, format: str, group_size: int,
) -> Tensor:  # fmt: skip
    return torch.empty_like(q)


@torch.library.custom_op("forebay::kv_append_paged", mutates_args=("pool",), device_types="cpu")
def kv_append_paged(
    k: Tensor, v: Tensor, slots: Tensor, pool: Tensor, block_tokens: int, format: str, group_size: int
) -> None:
    """Store k and v [B, Hkv, S, D] at slots int64 [B, S] of the pool; otherwise as rotary_append_paged."""
    if k.dim() != 4:
        _fail("kv_append_paged", "k", f"must be [B, Hkv, S, D], got shape {tuple(k.shape)}")
    layout = _layout(k, block_tokens, format, group_size)
    check_paged("kv_append_paged", k, v, slots, pool, layout)
    _write(pool, layout, slots, k, v)


@kv_append_paged.register_kernel("cuda")
def _(
    k: Tensor, v: Tensor, slots: Tensor, pool: Tensor, block_tokens: int, format: str, group_size: int
) -> None:
    from forebay.kernels.gpu.rotary_append import kv_append_paged as launch

    if k.dim() != 4:
        _fail("kv_append_paged", "k", f"must be [B, Hkv, S, D], got shape {tuple(k.shape)}")
    launch(k, v, slots, pool, _layout(k, block_tokens, format, group_size))


@kv_append_paged.register_fake
def _(
    k: Tensor, v: Tensor, slots: Tensor, pool: Tensor, block_tokens: int, format: str, group_size: int
) -> None:
    return None
