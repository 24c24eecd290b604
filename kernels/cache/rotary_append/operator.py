"""`forebay::rotary_append`, `rotary_append_paged` and `kv_append_paged`: new positions into the cache.

The first two turn queries and keys as `forebay::rotary` does and store keys and values, in one pass on a GPU; the third
only stores. A paged cache (`paged.BlockLayout`) may be quantised, with the codes of `forebay::quantize`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forebay.kernels.cache.kv_append import operator as kv_append_operator
from forebay.kernels.cache.kv_append import reference as kv_append_reference
from forebay.kernels.cache.rotary_append.reference import (
    check_paged,
    check_queries,
    fail,
    layout_of,
    paged_reference,
    reference,
    write_rows,
)
from forebay.kernels.dense_like import dense_like
from forebay.kernels.formats import paged
from forebay.kernels.formats.paged import BlockLayout
from forebay.kernels.operator import Cost, Operator, Use, dtype_of, nbytes_of
from forebay.kernels.positions.rotary import operator as rotary_operator


@torch.library.custom_op("forebay::rotary_append", mutates_args=("k_cache", "v_cache"), device_types="cpu")
def rotary_append(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, start: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """q [B, H, S, D] turned; k turned and v [B, Hkv, S, D] go to positions start[b] + s of the caches [B, Hkv, L, D].

    cos and sin [B or 1, S, D], start int64 [B]. ValueError names op and argument, of rotary or kv_append where that is
    the one concerned, before anything is written.
    """
    check_queries("rotary_append", q, k)
    kv_append_reference.check(k_cache, v_cache, k, v, start)
    out = rotary_operator.rotary(q, cos, sin)
    kv_append_operator.kv_append(k_cache, v_cache, rotary_operator.rotary(k, cos, sin), v, start)
    return out


@rotary_append.register_kernel("cuda")
def _(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, start: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    from forebay.kernels.cache.rotary_append.gpu import rotary_append as launch

    out = torch.empty_like(q)
    launch(q, k, v, cos, sin, start, k_cache, v_cache, out)
    return out


@rotary_append.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, start: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    return dense_like(q)


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
    layout = layout_of(k, block_tokens, format, group_size)
    check_paged("rotary_append_paged", k, v, slots, pool, layout)
    out = rotary_operator.rotary(q, cos, sin)
    write_rows(pool, layout, slots, rotary_operator.rotary(k, cos, sin), v)
    return out


@rotary_append_paged.register_kernel("cuda")
def _(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pool: Tensor,
    block_tokens: int, format: str, group_size: int,
) -> Tensor:  # fmt: skip
    from forebay.kernels.cache.rotary_append.gpu import rotary_append_paged as launch

    check_queries("rotary_append_paged", q, k)
    out = torch.empty_like(q)
    launch(q, k, v, cos, sin, slots, pool, layout_of(k, block_tokens, format, group_size), out)
    return out


@rotary_append_paged.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pool: Tensor,
    block_tokens: int, format: str, group_size: int,
) -> Tensor:  # fmt: skip
    return dense_like(q)


@torch.library.custom_op("forebay::kv_append_paged", mutates_args=("pool",), device_types="cpu")
def kv_append_paged(
    k: Tensor, v: Tensor, slots: Tensor, pool: Tensor, block_tokens: int, format: str, group_size: int
) -> None:
    """Store k and v [B, Hkv, S, D] at slots int64 [B, S] of the pool; otherwise as rotary_append_paged."""
    if k.dim() != 4:
        fail("kv_append_paged", "k", f"must be [B, Hkv, S, D], got shape {tuple(k.shape)}")
    layout = layout_of(k, block_tokens, format, group_size)
    check_paged("kv_append_paged", k, v, slots, pool, layout)
    write_rows(pool, layout, slots, k, v)


@kv_append_paged.register_kernel("cuda")
def _(
    k: Tensor, v: Tensor, slots: Tensor, pool: Tensor, block_tokens: int, format: str, group_size: int
) -> None:
    from forebay.kernels.cache.rotary_append.gpu import kv_append_paged as launch

    if k.dim() != 4:
        fail("kv_append_paged", "k", f"must be [B, Hkv, S, D], got shape {tuple(k.shape)}")
    launch(k, v, slots, pool, layout_of(k, block_tokens, format, group_size))


@kv_append_paged.register_fake
def _(
    k: Tensor, v: Tensor, slots: Tensor, pool: Tensor, block_tokens: int, format: str, group_size: int
) -> None:
    return None


def _cost(use: Use) -> Cost:
    """The new positions alone; the turned queries are the result."""
    q, k, v, cos, sin, start = use.args[:6]
    return Cost(0, nbytes_of(q, k, v, cos, sin, start), nbytes_of(*use.out, k, v))


def _stored_nbytes(k: Any, layout: tuple[int, str, int]) -> int:
    """Bytes of the K and V of tokens [T, Hkv, D] in blocks of (tokens, format, group size)."""
    tokens, format, group = layout
    count, heads, width = k.shape
    return count * heads * BlockLayout(tokens, heads, width, format, dtype_of(k), group).position_nbytes


def _rotary_paged_cost(use: Use) -> Cost:
    q, k, v, cos, sin, slots = use.args[:6]
    written = nbytes_of(*use.out) + _stored_nbytes(k, use.args[7:10])
    return Cost(0, nbytes_of(q, k, v, cos, sin, slots), written)


def _paged_cost(use: Use) -> Cost:
    k, v, slots = use.args[:3]
    return Cost(0, nbytes_of(k, v, slots), _stored_nbytes(k, use.args[4:7]))


ROTARY_APPEND = Operator(
    torch.ops.forebay.rotary_append.default, reference, _cost, caches=("k_cache", "v_cache")
)
ROTARY_APPEND_PAGED = Operator(torch.ops.forebay.rotary_append_paged.default, paged_reference, _rotary_paged_cost)
KV_APPEND_PAGED = Operator(torch.ops.forebay.kv_append_paged.default, paged.write, _paged_cost)
