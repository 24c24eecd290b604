"""Cost and workspace of attention over a whole cache, for any cache format."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from forebay.kernels.attention.decode_attention import decode_shares
from forebay.kernels.attention.operations import attention_flops
from forebay.kernels.operator import Cost, Use, dtype_of, each_once, nbytes_of
from forebay.kernels.products.linear.selection import HELD_COUNTERS_NBYTES


def attention_cost(use: Use) -> Cost:
    """Return the cost as if every sequence were as long as the cache, and saw all of it: fits of measured times count
    so too. Each query reads the rows that were chosen for it."""
    q, k = use.args[:2]
    batch, heads, queries, width = q.shape
    cost, chosen = caches_once(use), chosen_of(use)
    if chosen is None:
        return cost._replace(flops=int(attention_flops(batch, heads, queries, k.shape[2], width)))
    seen = min(k.shape[2], chosen.shape[2])
    every = nbytes_of(*use.args[1:2 if _attends_latents(use) else 3])
    read = every * queries * seen // k.shape[2]
    return cost._replace(flops=int(attention_flops(batch * queries, heads, 1, seen, width)),
                         read_nbytes=cost.read_nbytes - every + read)


def chosen_of(use: Use) -> Any:
    """The positions that were chosen for each query, [B, S, n]; None where a query sees all before it. Attention over
    values and over packed rows have them at the same place."""
    return use.args[12] if len(use.args) > 12 else None


def gathered_nbytes(use: Use) -> int:
    """Bytes of the rows that the CPU gathers for a query where some were chosen for it."""
    chosen, k = chosen_of(use), use.args[1]
    if chosen is None:
        return 0
    return 2 * nbytes_of(k) * min(k.shape[2], chosen.shape[2]) // (k.shape[0] * k.shape[2])


def caches_once(use: Use) -> Cost:
    """`each_once` of attention. Latents, which are keys and values, are read once."""
    each = each_once(use)
    return each._replace(read_nbytes=each.read_nbytes - nbytes_of(use.args[2])) if _attends_latents(use) else each


def _attends_latents(use: Use) -> bool:
    """Return whether keys are values too."""
    k, v = use.args[1:3]
    return k is v if isinstance(k, Tensor) else bool(k == v)


def gpu_workspace_nbytes(use: Use, bits: int = 0, group: int = 0) -> int:
    """Bytes of scratch that attention takes on a GPU; bits and group are those of packed rows."""
    q, k = use.args[:2]
    batch, heads, queries, width = q.shape
    if queries > 1 and bits and width > decode_shares.TYPICAL_LANES:
        return HELD_COUNTERS_NBYTES + unpacked_nbytes(q, k) * (1 if _attends_latents(use) else 2)
    if queries > 1:
        return HELD_COUNTERS_NBYTES
    itemsize, processors = dtype_of(q).itemsize, decode_shares.processors()
    return decode_shares.workspace_nbytes(
        batch, heads, k.shape[1], k.shape[2], width, itemsize, processors, bits, group)


def gpu_refusal(use: Use) -> str:
    """Return why no kernel of a GPU attends to rows of this width; "" where one does."""
    width, dtype = use.args[0].shape[3], dtype_of(use.args[0])
    most, wider = decode_shares.most_dim(dtype.itemsize), width <= decode_shares.most_dim(2)
    return "" if width <= most else (
        f"cache: a GPU attends to rows of at most {most} values in {str(dtype)[6:]}, in any format; this model's rows "
        f"have {width}. " + ("Take bfloat16: `forebay quantize --dtype bfloat16`" if wider else "Hide the GPU"))


def unpacked_nbytes(q: Any, cache: Any) -> int:
    """Bytes of the values of packed rows, to a multiple of 16: those of `cache` [B, Hkv, L, R], in q's dtype."""
    return -(-math.prod(cache.shape[:3]) * q.shape[3] * dtype_of(q).itemsize // 16) * 16


def cpu_shape(use: Use) -> tuple[Any, ...]:
    """(B, H, Hkv, S, L, D, dtype, softcap) of a use, as the CPU's workspace counts it."""
    q, k = use.args[:2]
    batch, heads, queries, width = q.shape
    return batch, heads, k.shape[1], queries, k.shape[2], width, dtype_of(q), use.args[6]
