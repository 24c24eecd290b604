"""Seconds that one item of a Program takes alone, and what it takes of the memory's rate."""

from __future__ import annotations

import math

import torch

from forebay.kernels.operator import Operator, each_once
from forebay.kernels.operators import find
from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.ir.operator_names import called
from forebay.rewriter.ir.program import (
    ATTEND,
    Copy,
    FileSlice,
    Item,
    Launch,
    Rows,
    TensorRef,
    copy_nbytes,
    dtype_itemsize,
    tier_of,
)
from forebay.rewriter.predict.estimator import Estimator

aten = torch.ops.aten
# these read as much as they write
GUESSED_BYTES_PER_S = 5e9  # of K and V, by a host's cores
LOOKUPS = frozenset(map(str, (aten.embedding.out, aten.gather.out, aten.index_select.out)))
APPENDS = frozenset((called(aten.index_copy_.default),))  # they write as much as they read, into something larger


def item_time_s(item: Item, times: Estimator) -> float:
    """Time of `item` with nothing beside it, in seconds; 0 for items that only order others."""
    if isinstance(item, Copy):
        return copy_time_s(item, times)
    if isinstance(item, Launch):
        return launch_time_s(item, times)
    return 0.0


def copy_time_s(item: Copy, times: Estimator) -> float:
    """bytes / bandwidth of the link; a lookup, which the step waits for, takes its latency too. That of other copies
    (`copy_latency_s`) is hidden while others are in flight."""
    src, tiers = item.src, (tier_of(item.src), tier_of(item.dst))
    if isinstance(src, Rows) and isinstance(src.table, FileSlice):
        rows = src.nbytes // src.row_nbytes  # whole pages are read
        return times.latency_s(*tiers) + rows * max(src.row_nbytes, PAGE_NBYTES) * times.byte_s(*tiers)
    usual = min((end.usual for end in (src, item.dst) if isinstance(end, Rows)), default=1.0)
    return usual * copy_nbytes(item) * times.byte_s(*tiers)


def copy_latency_s(item: Copy, times: Estimator) -> float:
    """Seconds that a copy takes longer when nothing was in flight before it; a lookup's stand in its time."""
    if isinstance(item.src, Rows) and isinstance(item.src.table, FileSlice):
        return 0.0
    return times.latency_s(tier_of(item.src), tier_of(item.dst))


def launch_time_s(item: Launch, times: Estimator) -> float:
    """For matrix products the measured time of the implementation; for attention that of the bytes it sees and the
    operations it does; for the rest bytes touched / memory bandwidth. On a CPU, whose issuing thread computes, after
    dispatch; a GPU computes while its launches are issued (`launch_issue_s`)."""
    dispatch_s = times.dispatch_s if times.serial else 0.0
    operator = find(item.op)
    if operator is not None and operator.implementations is not None:
        shape = operator.implementations.shape(item)
        return dispatch_s + times.product_s(*shape, nbytes=touched_nbytes(item), impl=item.impl)
    if operator is not None and operator.timed_as == "attention":
        if item.stream == ATTEND:
            return host_attend_s(_cache_nbytes(item, operator), times)
        return dispatch_s + _attention_time_s(item, operator, times)
    return dispatch_s + times.touch_s(touched_nbytes(item))


def host_attend_s(nbytes: float, times: Estimator) -> float:
    """Seconds of the host's attention over so many bytes, by a guess where nobody knows its rate but it is forced."""
    known = times.host_attention_s(nbytes)
    return known if math.isfinite(known) else nbytes / GUESSED_BYTES_PER_S


def launch_issue_s(times: Estimator) -> float:
    """Seconds that a launch takes of the issuing thread beside what computes it; 0 where that is the same thread."""
    return 0.0 if times.serial else times.dispatch_s


def touched_nbytes(item: Launch) -> int:
    """Bytes of memory that a launch reads and writes."""
    writes = sum(s.nbytes for s in item.writes)
    if item.op in LOOKUPS:
        return 2 * writes
    operator = find(item.op)
    if item.op in APPENDS or (operator is not None and operator.caches and operator.writes):
        # new positions, as large as what it reads else
        grown = {s.buffer for s in item.writes}
        return 2 * sum(s.nbytes for s in item.reads if s.buffer not in grown)
    return sum(s.nbytes for s in item.reads) + writes


def _attention_time_s(item: Launch, operator: Operator, times: Estimator) -> float:
    """As if every sequence were as long as the cache holds; queries of a chunk see on average half of it less."""
    refs = [ref for ref in item.args if isinstance(ref, TensorRef)]
    if len(refs) < 3 or len(refs[0].shape) != 4:
        return times.attention_s("", touched_nbytes(item), 0.0)
    return times.attention_s(refs[0].dtype, _cache_nbytes(item, operator), operator.cost(item).flops)


def _cache_nbytes(item: Launch, operator: Operator) -> int:
    """Bytes of K and V that attention reads: what it is given but for the values that it leaves."""
    k, v = [ref for ref in item.args if isinstance(ref, TensorRef)][1:3]
    left = each_once(item).read_nbytes - operator.cost(item).read_nbytes
    return (math.prod(k.shape) + math.prod(v.shape)) * dtype_itemsize(k.dtype) - left
