"""A cache format of two functions: what packs values into rows and what unpacks them, both by torch, on the CPU.

Both operators over such rows come from here, with their records: attention unpacks the visible part of the cache and
attends over values. A format that pays gets kernels of its own (`kernels/cache/kv_append_q/`,
`kernels/attention/attention_q/`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forebay.kernels.attention.attention.reference import reference as attend_values
from forebay.kernels.attention.attention_q.cpu import attend_unpacked, unpacked_nbytes
from forebay.kernels.attention.costs import attention_cost, cpu_shape
from forebay.kernels.attention.scoring import Scoring
from forebay.kernels.cache.kv_append_q.cpu import append_rows
from forebay.kernels.formats.table import CacheFormat
from forebay.kernels.operator import Call, Cost, Operator, Use, in_columns, nbytes_of
from forebay.kernels.operators import register_cache_format, register_operator

Pack = Callable[[Tensor], Tensor]
Unpack = Callable[[Tensor, int, torch.dtype], Tensor]


def cache_format_by_torch(
    name: str, *, row: Callable[[int], int], error: float, pack: Pack, unpack: Unpack
) -> CacheFormat:
    """Register a cache format, and the operators `forebay_rows::append_NAME` and `forebay_rows::attention_NAME`.

    Args:
        name: As users write it.
        row: Bytes of the row of `head_dim` elements, a multiple of 4.
        error: At most this share of normal values is lost (`CacheFormat.error`).
        pack: Makes rows uint8 [..., R] of values [..., D]; takes at most 24 bytes an element.
        unpack: Makes values [..., D] of a dtype of rows [..., R], D and the dtype; takes at most 16 bytes an element
            beside its result.

    Returns:
        The record, registered.

    Raises:
        ValueError: The name is no word, or known. Or rows of random values have another dtype or size than `row` says,
            lose more than `error`, or do not come back in their dtype.
    """
    _try_rows(name, row, error, pack, unpack)
    append, attend = _append(name, pack), _attention(name, unpack)
    register_operator(append)
    register_operator(attend)
    return register_cache_format(CacheFormat(name, append=append.name, attend=attend.name, row=row, error=error))


def _try_rows(name: str, row: Callable[[int], int], error: float, pack: Pack, unpack: Unpack) -> None:
    """ValueError where the functions do not do what a format's record says, at two sizes of heads."""
    if not name.isidentifier():
        raise ValueError(f"cache_format_by_torch: the name {name!r} must be letters, digits and _")
    draws = torch.Generator().manual_seed(0)
    for dtype, head_dim in ((torch.float32, 64), (torch.bfloat16, 128)):
        x = torch.randn(2, 3, 8, head_dim, generator=draws).to(dtype)
        rows = pack(x)
        if rows.dtype != torch.uint8 or rows.shape != (*x.shape[:-1], row(head_dim)):
            raise ValueError(f"cache_format_by_torch: pack of {name} makes {rows.dtype} {[*rows.shape]} of values "
                             f"{[*x.shape]}; `row` says uint8 {[*x.shape[:-1], row(head_dim)]}")
        back = unpack(rows, head_dim, dtype)
        if back.dtype != dtype or back.shape != x.shape:
            raise ValueError(f"cache_format_by_torch: unpack of {name} makes {back.dtype} {[*back.shape]}; the rows "
                             f"hold {dtype} {[*x.shape]}")
        lost = float((back.float() - x.float()).norm() / x.float().norm())
        if not lost <= error:
            raise ValueError(f"cache_format_by_torch: rows of {name} lose {lost:.3g} of random values; `error` says at "
                             f"most {error:g}")


def _append(name: str, pack: Pack) -> Operator:
    def bind(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> Call:
        return lambda: append_rows(k_cache, v_cache, k, v, start, pack)

    @torch.library.custom_op(f"forebay_rows::append_{name}", mutates_args=("k_cache", "v_cache"), device_types="cpu")
    def append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> None:
        bind(k_cache, v_cache, k, v, start)()

    @append.register_fake
    def _(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor) -> None:
        return None

    def reference(k_cache: Tensor, v_cache: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        made = k_cache.clone(), v_cache.clone()
        bind(*made, *others)()
        return made

    def cost(use: Use) -> Cost:
        k_cache, v_cache, k, v, start = use.args
        return Cost(0, nbytes_of(k, v, start), math.prod(k.shape[:3]) * (k_cache.shape[3] + v_cache.shape[3]))

    return Operator(append._opoverload, reference, cost, bind={"cpu": lambda use: bind(*use.args)},
                    workspace={"cpu": lambda use: 24 * sum(math.prod(x.shape) for x in use.args[2:4])},
                    caches=("k_cache", "v_cache"))


def _attention(name: str, unpack: Unpack) -> Operator:
    def bind(q: Tensor, k_cache: Tensor, v_cache: Tensor, start: Tensor, scoring: Scoring, out: Tensor) -> Call:
        return lambda: attend_unpacked(q, k_cache, v_cache, start, scoring,
                                       lambda rows: unpack(rows, q.shape[3], q.dtype), out)

    @torch.library.custom_op(f"forebay_rows::attention_{name}", mutates_args=(), device_types="cpu")
    def attention(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, start: Tensor, scale: float, window: int, softcap: float
    ) -> Tensor:
        batch, heads, queries, dim = q.shape
        out = q.new_empty(batch, queries, heads, dim)
        bind(q, in_columns(k_cache), in_columns(v_cache), start, Scoring(scale, window, softcap), out)()
        return out

    @attention.register_fake
    def _(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, start: Tensor, scale: float, window: int, softcap: float
    ) -> Tensor:
        batch, heads, queries, dim = q.shape
        return q.new_empty(batch, queries, heads, dim)

    def reference(q: Tensor, k_cache: Tensor, v_cache: Tensor, *others: Any) -> Tensor:
        k, v = (unpack(cache, q.shape[3], torch.float32) for cache in (k_cache, v_cache))
        return attend_values(q, k, v, *others)

    return Operator(attention._opoverload, reference, attention_cost,
                    bind={"cpu": lambda use: bind(*(*use.args[:4], Scoring(*use.args[4:]), *use.out))},
                    workspace={"cpu": lambda use: unpacked_nbytes(*cpu_shape(use))},
                    layouts={"k_cache": "columns", "v_cache": "columns"}, caches=("k_cache", "v_cache"),
                    timed_as="attention")
