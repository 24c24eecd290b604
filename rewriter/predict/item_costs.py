"""Seconds that one item of a Program takes alone, and what it takes of the memory's rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from forebay.kernels.attention.costs import chosen_of
from forebay.kernels.attention.operations import attention_flops
from forebay.kernels.operator import Operator, each_once, nbytes_of
from forebay.kernels.operators import CHOOSE_TOKENS, EXPERTS, MEAN_KEYS, find
from forebay.kernels.products.experts.operator import arguments_of
from forebay.rewriter.ir.alignment import GATHER_NBYTES, PAGE_NBYTES, ROW_GAP_NBYTES, ROW_READ_NBYTES
from forebay.rewriter.ir.operator_names import called
from forebay.rewriter.ir.program import (
    ATTEND,
    COLLECT,
    COMPUTE,
    HOST,
    Copy,
    FileSlice,
    Item,
    Launch,
    Rows,
    TensorRef,
    copy_nbytes,
    dtype_itemsize,
    row_major_strides,
    span_of,
    tier_of,
)
from forebay.rewriter.ir.share import ranks_of
from forebay.rewriter.predict.estimator import Estimator

aten = torch.ops.aten
# these read as much as they write
GUESSED_BYTES_PER_S = 5e9  # of K and V, or of weights, by a host's cores
LOOKUPS = frozenset(map(str, (aten.embedding.out, aten.gather.out, aten.index_select.out)))
APPENDS = frozenset((called(aten.index_copy_.default),))  # they write as much as they read, into something larger


def item_time_s(item: Item, times: Estimator, seen: Mapping[int, float] | None = None) -> float:
    """Time of `item` with nothing beside it, in seconds; 0 for items that only order others. `seen` as of a Program;
    where it does not say, attention sees all that the cache holds."""
    if isinstance(item, Copy):
        return copy_time_s(item, times)
    if isinstance(item, Launch):
        return launch_time_s(item, times, seen or {})
    return 0.0


def copy_time_s(item: Copy, times: Estimator) -> float:
    """bytes / bandwidth of the link; a lookup, which the step waits for, takes its latency too. That of other copies
    (`copy_latency_s`) is hidden while others are in flight. Rows of a table in host memory are brought together there,
    at the rate at which it reads K and V."""
    src, tiers = item.src, (tier_of(item.src), tier_of(item.dst))
    if isinstance(src, Rows) and not src.skips and isinstance(src.table, FileSlice):
        requests, nbytes = lookup_reads(src.nbytes // src.row_nbytes, src.row_nbytes, src.table.nbytes)
        return (times.latency_s(*tiers) + max(0.0, requests - 1) * times.row_request_s
                + nbytes * times.byte_s(*tiers))
    if tiers == ("host", "host"):
        seconds = times.host_attention_s(src.nbytes)
        return seconds if math.isfinite(seconds) else src.nbytes / GUESSED_BYTES_PER_S
    typical = min((end.typical for end in (src, item.dst) if isinstance(end, Rows)), default=1.0)
    return typical * taken_nbytes(item) * times.byte_s(*tiers)


def slices_of(item: Copy) -> int:
    """Slices of files that a copy reads; what names its rows says how many of others."""
    return item.src.slices if isinstance(item.src, FileSlice) else 1


def taken_nbytes(item: Copy) -> int:
    """Bytes that a copy takes from where it begins: of pieces of rows with what lies between, where that is little."""
    bands = item.src.bands if isinstance(item.src, FileSlice) else ()
    return sum(band.count * (band.row_nbytes if band.stride - band.row_nbytes > GATHER_NBYTES else
                             max(band.stride, band.row_nbytes)) for band in bands) or copy_nbytes(item)


def lookup_reads(rows: int, row_nbytes: int, table_nbytes: int) -> tuple[float, float]:
    """Return how many reads a lookup of so many rows anywhere in a table takes, and their bytes: those that lie near
    each other come in one, with what lies between. Gaps between random rows are taken to be exponentially
    distributed."""
    if not rows:
        return 0.0, 0.0
    gap, alone = table_nbytes / rows, row_nbytes + PAGE_NBYTES - math.gcd(row_nbytes, PAGE_NBYTES)  # whole pages
    widest = ROW_GAP_NBYTES + alone
    apart = math.exp(-widest / gap)  # of the gaps, the share that is too wide
    near = gap * (1 - apart) - widest * apart  # bytes from one to the next, where they come in one read
    runs = 1 + (rows - 1) * apart
    long = (rows - 1) * near / runs  # bytes of a run, which is cut where it is longer than a read
    cuts = 1 / math.expm1(ROW_READ_NBYTES / long) if long * 100 > ROW_READ_NBYTES else 0.0
    return runs * (1 + cuts), min(float(table_nbytes), runs * (alone + long))


def copy_latency_s(item: Copy, times: Estimator) -> float:
    """Seconds that a copy takes longer when nothing was in flight before it; a lookup's stand in its time."""
    if isinstance(item.src, Rows) and not item.src.skips and isinstance(item.src.table, FileSlice):
        return 0.0
    tiers = tier_of(item.src), tier_of(item.dst)
    return 0.0 if tiers == ("host", "host") else times.latency_s(*tiers)


def launch_time_s(item: Launch, times: Estimator, seen: Mapping[int, float]) -> float:
    """For matrix products the measured time of the implementation; for attention that of the bytes it sees and the
    operations it does; for the rest bytes touched / memory bandwidth, or what packing takes. On a CPU, whose issuing
    thread computes, after dispatch; a GPU computes while its launches are issued (`launch_issue_s`). An exchange takes
    what it does once all ranks are there: how long it waits for them, one rank's Program does not know. A launch that
    reads host memory in place takes no less than these bytes do at that rate."""
    if item.stream == COLLECT:
        return times.exchange_s(item.op.split(".")[1], len(ranks_of(item.args[-1])), sum(s.nbytes for s in item.writes))
    operator = find(item.op)
    if operator is EXPERTS and item.stream == ATTEND:
        work = _experts_work(item)
        return host_product_s(work.kind, work.held, EXPERTS.cost(item).flops, times)
    if operator is not None and operator.timed_as == "attention" and item.stream == ATTEND:
        return host_attend_s(*_attended(item, operator, seen)[:2], times)
    dispatch_s = times.torch_dispatch_s if operator is None else times.dispatch_s
    computing_s = work_time_s(item, times, seen)
    if far := host_read_nbytes(item):
        computing_s = max(computing_s, times.in_place_byte_s * min(far, _needed_nbytes(item, operator, seen)))
    return (dispatch_s if times.serial else 0.0) + computing_s


def _needed_nbytes(item: Launch, operator: Operator | None, seen: Mapping[int, float]) -> float:
    """Bytes of what a launch may read that it needs: of experts those that are picked, of caches those of tokens."""
    if operator is EXPERTS:
        return _experts_work(item).held
    if operator is not None and operator.timed_as == "attention" and len(_tensors(item)[0].shape) == 4:
        return _attended(item, operator, seen)[0]
    return touched_nbytes(item)


def host_read_nbytes(item: Launch) -> int:
    """Bytes of host memory among what a launch of the device may read, in place."""
    return sum([s.nbytes for s in item.reads if s.arena == HOST]) if item.stream == COMPUTE else 0


def work_time_s(item: Launch, times: Estimator, seen: Mapping[int, float]) -> float:
    """Return the time that a launch computes on the device, without the time to issue it."""
    operator = find(item.op)
    if operator is not None and operator.implementations is not None:
        shape = operator.implementations.shape(item)
        return times.product_s(*shape, nbytes=touched_nbytes(item), impl=item.impl)
    if operator is not None and operator.timed_as == "attention":
        return _attention_time_s(item, operator, times, seen)
    if operator is EXPERTS:
        work = _experts_work(item)
        return times.product_s(*work[:-1], nbytes=work.held)
    time_s = times.touch_s(touched_nbytes(item))
    if operator in (None, CHOOSE_TOKENS) and item.flops:  # torch's matmuls by heads, as around latents
        time_s = max(time_s, times.work_s(item.flops, 0.0))
    if operator is not None and operator.appends:
        values = sum(math.prod(ref.shape) for ref in _tensors(item) if ref.dtype not in ("uint8", "int64"))
        time_s = max(time_s, times.pack_s(operator.cache_format(item.args), values))
    return time_s


class _ExpertsWork(NamedTuple):
    """A launch over experts as one product of m rows by n rows of k columns, with all that the experts hold.

    Attributes:
        kind: The weights' dtype or packed format.
        m: Rows that each expert has.
        n: Rows of the experts that are read.
        k: Columns.
        held: Their bytes.
    """

    kind: str
    m: int
    n: int
    k: int
    held: int


def _experts_work(item: Launch) -> _ExpertsWork:
    given, cost = arguments_of(item.args), EXPERTS.cost(item)
    held = max(1, cost.read_nbytes - nbytes_of(given.x, given.index, given.weights))
    hidden, units = given.x.shape[-1], 2 * given.inner if given.form.gated else given.inner
    entry = given.table.shape[1] * dtype_itemsize(given.table.dtype)
    elements = held * (units + given.inner) * hidden / entry
    kind = given.stored.up.packing(hidden).format if given.stored.packed else given.table.dtype
    rows = cost.flops / 2 / max(1.0, elements)
    return _ExpertsWork(kind, max(1, round(rows)), max(1, round(elements / hidden)), hidden, held)


def over_tokens(item: Launch, tokens: int) -> Launch:
    """A launch of a step over one token of each sequence that touches a cache, as a step over so many has it: queries,
    keys and values [B, H, 1, D] become as many."""
    operator = find(item.op)
    if operator is None or tokens == 1:
        return item
    caches = {operator.arguments.index(name) for name in operator.caches}
    args = list(item.args)
    for i, arg in enumerate(args):
        if isinstance(arg, TensorRef) and len(arg.shape) == 4 and i not in caches:
            shape = *arg.shape[:2], tokens, arg.shape[3]
            args[i] = replace(arg, shape=shape, stride=row_major_strides(shape))
    reads = tuple(span_of(arg) for arg in args if isinstance(arg, TensorRef))
    return replace(item, op=operator.name, args=tuple(args), reads=reads)


def attention_intensity(launches: Iterable[Launch]) -> float:
    """Operations for each byte of the caches that launches attend over, the most of them: many where many heads share
    one."""
    found = [0.0]
    for item in launches:
        operator = find(item.op)
        if operator is not None and operator.timed_as == "attention" and len(_tensors(item)[0].shape) == 4:
            nbytes, flops, _ = _attended(item, operator, {})
            found.append(flops / max(1.0, nbytes))
    return max(found)


def host_attend_s(nbytes: float, flops: float, times: Estimator) -> float:
    """Seconds of the host's attention over so many bytes, by a guess where nobody knows its rate but it is forced."""
    known = times.host_attention_s(nbytes, flops)
    return known if math.isfinite(known) else nbytes / GUESSED_BYTES_PER_S


def host_product_s(kind: str, nbytes: float, flops: float, times: Estimator) -> float:
    """Seconds of the host's matmuls with so many bytes of weights, by a guess where nobody knows its rate but they are
    forced."""
    known = times.host_product_s(kind, nbytes, flops)
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
    if operator is MEAN_KEYS:  # few of the keys that it may read
        cost = MEAN_KEYS.cost(item)
        return cost.read_nbytes + cost.written_nbytes
    if item.op in APPENDS or (operator is not None and operator.appends):
        # new positions, as large as what it reads else
        grown = {s.buffer for s in item.writes}
        return 2 * sum(s.nbytes for s in item.reads if s.buffer not in grown)
    return sum(s.nbytes for s in item.reads) + writes


def _attention_time_s(item: Launch, operator: Operator, times: Estimator, seen: Mapping[int, float]) -> float:
    """Queries of a chunk see on average half of it less."""
    refs = _tensors(item)
    if len(refs) < 3 or len(refs[0].shape) != 4:
        return times.attention_s("", touched_nbytes(item), 0.0)
    nbytes, flops, matmul_flops = _attended(item, operator, seen)
    attention_s = times.attention_s(operator.cache_format(item.args) or refs[0].dtype, nbytes, flops)
    return attention_s + times.work_s(matmul_flops, 0.0)


def _attended(item: Launch, operator: Operator, seen: Mapping[int, float]) -> tuple[float, float, float]:
    """Bytes of K and V that attention reads, but for values that it leaves, its operations and those of its matmuls: of
    as many tokens as its queries usually see, and no more than its window."""
    q, k, v = _tensors(item)[:3]
    queries, capacity = q.shape[2], k.shape[2]
    left = each_once(item).read_nbytes - operator.cost(item).read_nbytes
    nbytes = (math.prod(k.shape) + math.prod(v.shape)) * dtype_itemsize(k.dtype) - left
    window = next((arg for arg in item.args[5:6] if isinstance(arg, int)), 0)
    there = min(capacity, seen.get(queries, capacity))
    read = min(there, window + queries - 1) if window else there
    alike = attention_flops(1, 1, queries, there, 1, window) / attention_flops(1, 1, queries, there, 1)
    caches = tuple(replace(arg, shape=(*arg.shape[:2], there, arg.shape[3])) if arg in (k, v) else arg
                   for arg in item.args)
    cost = operator.cost(replace(item, args=caches))
    if (chosen := chosen_of(item)) is not None:  # rows that each query reads for itself
        rows = q.shape[0] * queries * min(there, chosen.shape[2])
        return rows * math.prod(k.shape[1::2]) * dtype_itemsize(k.dtype), cost.flops, 0.0
    return nbytes * read / capacity, (cost.flops - cost.matmul_flops) * alike, cost.matmul_flops


def _tensors(item: Launch) -> list[TensorRef]:
    return [ref for ref in item.args if isinstance(ref, TensorRef)]
