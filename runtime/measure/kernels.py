"""Time the kernels that steps are made of: products by rows and size, attention, and both beside reads from disk.

On the CPU, that is; `measure_cuda` times a GPU's, in the same turns.

Whatever is compared takes turns, round by round, and one number of the rounds counts (`settled_s`): on a machine with
neighbours a second can be slow as a whole, and must not fall on one candidate alone.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from forebay.kernels.attention.operations import attention_flops
from forebay.kernels.build.process_limits import available_nbytes, last_level_nbytes
from forebay.kernels.formats.packing import Packing
from forebay.kernels.formats.table import TIMED_WEIGHTS, CacheFormat, packed_caches, packed_format
from forebay.kernels.operator import HOST_KERNELS, ROUNDED, Call, Operator, Product, Tensors
from forebay.kernels.operators import ATTENTION, EXPERTS, find, product_with
from forebay.kernels.products.experts.entries import entry_parts, table_shape
from forebay.kernels.products.experts.reference import Form, Storage, Stored
from forebay.rewriter.machine.points import AttentionPoint, GemmPoint, intensity
from forebay.runtime.measure.steady import settled_s, steady_times
from forebay.runtime.run.arena import Arena
from forebay.runtime.run.sampling import most_likely

MIB = 1 << 20
GEMM_M = (1, 2, 4, 8, 16, 32, 64, 256)
QUICK_M = (1, 4, 16, 64, 256)
QUICK_S = 0.75  # for all kinds of products: on a machine in use the rounds are fewer
GEMM_SHAPES = ((2048, 2048), (256, 512), (4096, 512), (1024, 1024), (5632, 2048), (1024, 4096))  # (n, k)
# Few and small: a short call is more often left alone, and the fastest of many counts.
QUICK_SHAPES = ((2048, 1024), (256, 1024))
QUICK_MULTIPLIES = 1 << 27  # of a product, at most: a millisecond
COLD_NBYTES = 64 * MIB  # products take turns over weights of this total at least: those of a step are cold
COLD_CACHES = 1.25  # sizes of the last-level cache that they have together, so that none of them stays in it
COLD_SHARE = 1 / 8  # of the memory that is free, at most
LARGEST_NBYTES = 4 * 8 * MIB  # K and V, or a weight, of a timed call
HOPELESS = 2.5  # an implementation so many times slower than the best of its kind is timed no more: nobody chooses it
FIRST = 3  # turns of each before any is hopeless
INTERRUPTION_S = 8e-3  # what other processes add to a short call, at most
BURST_S = 1e-3  # calls shorter than this are timed several at a time
READ_NBYTES = 8 * MIB
# (batch, queries, tokens seen) over 8 heads of 64 for K and V, twice as many for queries
ATTENTION_SHAPES = ((1, 1, 128), (8, 1, 128), (32, 1, 128), (1, 1, 4096), (8, 1, 1024), (1, 64, 64), (8, 64, 64),
                    (1, 64, 1024), (1, 256, 512))
QUICK_ATTENTION = ((1, 1, 128), (8, 1, 1024), (1, 64, 64), (1, 256, 512))
KV_HEADS, HEADS, HEAD_DIM = 8, 16, 64
HOST_KINDS = ("float32", "bfloat16", "w8g64", "w4g64")
EXPERT_HIDDEN, EXPERT_INNER, PICKED = 2048, 512, 2  # picked experts of float32 are 24 MiB
MANY_ROWS = 64  # of each of the experts
FILL = 0x11  # a small number in any dtype, and code 1 of small scales in packed rows; nothing is subnormal

TimedProduct = tuple[str, int, Iterable[Call]]  # implementation, rows of x, calls over weights outside the caches


def burst_s(turn: Iterator[Call], count: int) -> float:
    """Seconds of one of the next `count` calls on this thread."""
    calls = [next(turn) for _ in range(count)]
    start = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start) / count


def call_s(turn: Iterator[Call], count: int) -> float:
    """Seconds of one of the next `count` calls (`settled_s`), each timed alone: on a busy machine some of a burst are
    interrupted for milliseconds, and would hide the others in a mean.

    Several calls follow one that is not timed, and each other at once, as the launches of a step do. Waking the
    kernels' threads takes up to 40 us, and binding a call is time enough for them to fall asleep.
    """
    times = []
    calls = [next(turn) for _ in range(count + (count > 1))]
    if count > 1:
        calls.pop(0)()
    for call in calls:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return settled_s(times)


def call_times_s(
    timed: Mapping[tuple, Iterable[Call]], rounds: int, burst_s: Callable[[Iterator[Call], int], float] = call_s,
    limit_s: float = math.inf,
) -> dict[tuple, float]:
    """Seconds of one call of each entry (`settled_s`), over `rounds` rounds in which all take their turn.

    Keys are (implementation, what it does, …). The calls of an entry are used in rotation; one is made before anything
    is timed. `burst_s` gives the seconds of one of so many calls. No round begins after `limit_s`, but for the first.
    """
    began_s = time.monotonic()
    turns = {key: calls if isinstance(calls, Iterator) else itertools.cycle(calls) for key, calls in timed.items()}
    times = _first_times(turns, burst_s)
    best: dict[tuple, float] = {}
    for key, found in times.items():
        best[key[1:]] = min(best.get(key[1:], math.inf), min(found))
    counts = {key: max(1, min(64, math.ceil(BURST_S / min(found)))) for key, found in times.items()}
    rivals = [key for key, found in times.items() if min(found) <= HOPELESS * best[key[1:]]]
    for number in range(rounds):
        if number and time.monotonic() > began_s + limit_s:
            break
        for key in rivals:
            times[key].append(burst_s(turns[key], counts[key]))
    return {key: settled_s(found) for key, found in times.items()}


def _first_times(
    turns: Mapping[tuple, Iterator[Call]], burst_s: Callable[[Iterator[Call], int], float]
) -> dict[tuple, list[float]]:
    """Seconds of one call of each entry, in one burst or more: others may interrupt the first.

    An implementation that takes ten times as long as another each time, and longer than any interruption, is left out
    for all that follows.
    """
    times: dict[tuple, list[float]] = {}
    left_out: set[tuple] = set()
    for _, group in itertools.groupby(turns, lambda key: key[1:]):
        keys = [key for key in group if key[:2] not in left_out]
        for key in keys:
            next(turns[key])()
            times[key] = [burst_s(turns[key], 1)]
        best = min((times[key][0] for key in keys), default=0.0)
        for key in keys:
            if times[key][0] > HOPELESS * best:
                times[key] += [burst_s(turns[key], 1) for _ in range(FIRST - 1)]
            if min(times[key]) > 10 * best + INTERRUPTION_S:
                left_out.add(key[:2])
    return times


# Products


def gemm_points(quick: bool, say: Callable[[str, float], None]) -> tuple[GemmPoint, ...]:
    """Times of [m, k] x [n, k]^T on the CPU by every implementation there is, in float32, bfloat16 and packed rows."""
    shapes, rows, rounds, most = (QUICK_SHAPES, QUICK_M, 25, QUICK_MULTIPLIES) if quick else (
        GEMM_SHAPES, GEMM_M, 15, math.inf)

    def products(kind: str, n: int, k: int) -> Iterator[TimedProduct]:
        return _products([m for m in rows if m * n * k <= most], kind, n, k)

    return timed_products(("float32", "bfloat16", *TIMED_WEIGHTS), shapes, rounds, products, say,
                          limit_s=QUICK_S if quick else math.inf)


def timed_products(
    kinds: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    rounds: int,
    products: Callable[[str, int, int], Iterator[TimedProduct]],
    say: Callable[[str, float], None],
    burst_s: Callable[[Iterator[Call], int], float] = call_s,
    limit_s: float = math.inf,
) -> tuple[GemmPoint, ...]:
    """Times of what `products` gives for each kind of weight and each (n, k); those of one kind take turns. With a
    limit in seconds for all of them nothing is measured a second time."""
    points: list[GemmPoint] = []
    for i, kind in enumerate(kinds):
        say("kernels", 0.5 + 0.35 * i / len(kinds))
        timed: dict[tuple, Iterable[Call]] = {}
        for n, k in shapes:
            timed |= {(impl, kind, m, n, k): calls for impl, m, calls in products(kind, n, k)}
        found = steady_times(timed, lambda some: call_times_s(some, rounds, burst_s, limit_s / len(kinds)),
                             lambda key: (key[:3], (key[3], key[3] * key[4])), None if limit_s == math.inf else 1)
        points += [GemmPoint(impl, dtype, m, n, k, t) for (impl, dtype, m, n, k), t in found.items()]
    return tuple(points)


def _products(rows: Sequence[int], kind: str, n: int, k: int) -> Iterator[TimedProduct]:
    """By every implementation, for weights of a dtype, or packed rows for bfloat16 x."""
    operator, how, dtype = product_of(kind, k, torch.bfloat16)
    assert operator.implementations is not None
    weights = (cold_parts(torch.uint8, n, Packing(**how).row_nbytes) if "bits" in how
               else cold_parts(dtype, n, k))
    for m in rows:
        x, out = torch.ones(m, k, dtype=dtype), torch.empty(m, n, dtype=dtype)
        shape = Product(kind, m, n, k)
        rounding = (name for wish in ROUNDED for name in operator.implementations.rounding(shape, wish))
        for impl in (*operator.implementations.candidates(kind), *rounding):
            yield impl, m, ColdCalls(functools.partial(_bound, operator, x, out, how, impl), weights)


def _bound(operator: Operator, x: torch.Tensor, out: torch.Tensor, how: dict[str, Any], impl: str,
           weight: torch.Tensor) -> Call:
    return operator.bind[HOST_KERNELS](Tensors((x, weight, None), how, (out,), impl))


def product_of(kind: str, k: int, half: torch.dtype) -> tuple[Operator, dict[str, Any], torch.dtype]:
    """The product of weights of a dtype, or of packed rows with x and scales of dtype `half`; how a launch of it says
    what it reads, and x's dtype."""
    operator = product_with(kind)
    stored = packed_format(kind)
    if stored is None:
        return operator, {"form": "nk", "accumulate": False}, getattr(torch, kind)
    return operator, Packing(stored.bits, k, stored.group_size, half, stored.symmetric, stored.codebook)._asdict(), half


@functools.lru_cache(1)
def cold_memory() -> Arena:
    """Memory of FILL for what is timed to take turns over, in huge pages as weights are when a plan runs.

    It is larger than the last-level cache, where that is known and memory allows it, and has room for two of the
    largest at least. It is kept until `cold_memory.cache_clear()`.
    """
    wanted = min(int(COLD_CACHES * last_level_nbytes()), int(COLD_SHARE * available_nbytes()))
    memory = Arena(max(COLD_NBYTES, 2 * LARGEST_NBYTES, wanted // MIB * MIB))
    memory.bytes.fill_(FILL)
    return memory


class ColdCalls(Iterator[Call]):
    """Calls without end, each over the part of `cold_memory` after the one that any such call was last made over: all
    of the memory lies between two uses of a part, whoever takes turns."""

    reached = 0  # bytes of the memory, up to which a call was last made

    def __init__(self, bind: Callable[[torch.Tensor], Call], parts: torch.Tensor) -> None:
        self.bind, self.parts, self.nbytes = bind, parts, parts[0].nbytes
        self.bound: dict[int, Call] = {}

    def __next__(self) -> Call:
        at = -(-ColdCalls.reached // self.nbytes)
        at = 0 if at >= len(self.parts) else at
        ColdCalls.reached = (at + 1) * self.nbytes
        call = self.bound.get(at)
        if call is None:
            call = self.bound[at] = self.bind(self.parts[at])
        return call


def cold_parts(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return the tensors of a shape that fit in `cold_memory`: [count, *shape]."""
    memory, nbytes = cold_memory(), math.prod(shape) * dtype.itemsize
    count = memory.nbytes // nbytes
    return memory.bytes[: count * nbytes].view(dtype).view(count, *shape)


def cold_products(m: int, n: int, k: int, dtype: torch.dtype, impl: str = "") -> ColdCalls:
    """Products of `m` rows by an implementation, or by what a plan would take; all are bound before any is timed."""
    from forebay.kernels.products.linear import cpu as linear

    x, out = torch.ones(m, k, dtype=dtype), torch.empty(m, n, dtype=dtype)
    name = impl or linear.default_choice(dtype, m, n, k)
    calls = ColdCalls(lambda weight: linear.bind_linear(name, x, weight, None, out), cold_parts(dtype, n, k))
    for _ in calls.parts:
        next(calls)
    return calls


# Attention


def attention_points(quick: bool) -> tuple[AttentionPoint, ...]:
    """Times of causal attention by our CPU kernels, over K and V as they are and over packed rows; the new tokens are
    the last that are seen."""
    timed: dict[tuple, Iterable[Call]] = {}
    shapes = QUICK_ATTENTION if quick else ATTENTION_SHAPES
    for kind in ("float32", "bfloat16", *_caches_here()):
        for batch, queries, tokens in shapes:
            flops = int(attention_flops(batch, HEADS, queries, tokens, HEAD_DIM))
            nbytes, calls = _attention_calls(kind, batch, queries, tokens)
            timed["flat", kind, nbytes, flops, batch] = calls
    rounds, limit_s, tries = (9, QUICK_S / 4, 1) if quick else (15, math.inf, None)
    found = steady_times(timed, lambda some: call_times_s(some, rounds, limit_s=limit_s),
                         lambda key: ((key[1], intensity(key[3], key[2])), (key[2],)), tries)
    return tuple(AttentionPoint(kind, nbytes, flops, t) for (_, kind, nbytes, flops, _), t in found.items())


def _caches_here() -> dict[str, tuple[CacheFormat, Operator]]:
    """The formats of packed rows that the CPU has kernels for, with the operators that write them."""
    found = {name: (packed, find(packed.append)) for name, packed in packed_caches().items()}
    return {name: (packed, append) for name, (packed, append) in found.items()
            if append is not None and HOST_KERNELS in append.bind}


def _attention_calls(kind: str, batch: int, queries: int, tokens: int) -> tuple[int, ColdCalls]:
    """Bytes of K and V, of a dtype or of packed rows with bfloat16 queries, and calls over parts of
    `cold_memory`."""
    packed = packed_caches().get(kind)
    operator = ATTENTION if packed is None else find(packed.attend)
    how = () if packed is None else packed.arguments(HEAD_DIM).values()
    assert operator is not None
    dtype = torch.bfloat16 if packed else getattr(torch, kind)
    width = packed.row_nbytes(HEAD_DIM, dtype.itemsize) if packed else HEAD_DIM
    nbytes = 2 * batch * KV_HEADS * tokens * width * (1 if packed else dtype.itemsize)
    bind = operator.bind[HOST_KERNELS]
    q = torch.ones(batch, HEADS, queries, HEAD_DIM, dtype=dtype)
    out = torch.empty(batch, queries, HEADS, HEAD_DIM, dtype=dtype)
    start = torch.full((batch,), tokens - queries)

    def bound(pair: torch.Tensor) -> Call:
        return bind(Tensors((q, *pair, start, HEAD_DIM**-0.5, 0, 0.0, *how), {}, (out,)))

    return nbytes, ColdCalls(bound, cold_parts(torch.uint8 if packed else dtype, 2, batch, KV_HEADS, tokens, width))


def pack_elements_per_s(quick: bool) -> dict[str, float]:
    """Values per second that our CPU kernels make packed rows of a cache of, by format."""
    batch, tokens = 8, 32
    k, v = torch.randn(2, batch, KV_HEADS, tokens, HEAD_DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    timed: dict[tuple, Iterable[Call]] = {}
    for name, (packed, append) in _caches_here().items():
        keys, values = torch.zeros(
            2, batch, KV_HEADS, tokens, packed.row_nbytes(HEAD_DIM, k.element_size()), dtype=torch.uint8)
        start = torch.zeros(batch, dtype=torch.int64)
        given = keys, values, k, v, start, *packed.arguments(HEAD_DIM).values()
        timed["flat", name] = [append.bind[HOST_KERNELS](Tensors(given, {}, ()))]
    return {name: 2 * k.numel() / t for (_, name), t in call_times_s(timed, 9 if quick else 15).items()}


# Experts of the host beside a GPU


def host_product_rates(quick: bool) -> tuple[dict[str, float], float]:
    """Bytes per second at which our CPU kernels multiply one token by its experts, by dtype and packed format, and
    operations per second for so many tokens that all experts have many rows."""
    timed: dict[tuple, Iterable[Call]] = {}
    nbytes = {}
    for kind in HOST_KINDS:
        nbytes[kind], timed["flat", kind] = _experts_calls(kind, 1)
    _, timed["flat", "many"] = _experts_calls("bfloat16", MANY_ROWS)
    times = call_times_s(timed, 9 if quick else 15)
    flops = 2 * MANY_ROWS * PICKED * 3 * EXPERT_HIDDEN * EXPERT_INNER
    return {kind: nbytes[kind] / times["flat", kind] for kind in HOST_KINDS}, flops / times["flat", "many"]


def _experts_calls(kind: str, tokens: int) -> tuple[int, ColdCalls]:
    """Bytes of the experts that one token picks, of a dtype or packed format, and calls over parts of `cold_memory`, by
    as many tokens."""
    packed, dtype = packed_format(kind), torch.bfloat16 if packed_format(kind) else getattr(torch, kind)
    how = Stored() if packed is None else Stored(packed.bits, packed.group_size, symmetric=packed.symmetric)
    stored, form = Storage(how, how), Form()
    parts = entry_parts(EXPERT_HIDDEN, EXPERT_INNER, form, stored, False, dtype)
    x = torch.ones(tokens, EXPERT_HIDDEN, dtype=dtype)
    index = torch.arange(PICKED).expand(tokens, PICKED).contiguous()
    weights, out = torch.ones(tokens, PICKED, dtype=dtype), torch.empty_like(x)
    tables = cold_parts(parts[0].dtype, *table_shape(PICKED, parts))
    args = EXPERT_INNER, False, *form, *stored.up, *stored.down

    def bind(table: torch.Tensor) -> Call:
        return EXPERTS.bind[HOST_KERNELS](Tensors((x, index, weights, table, *args), {}, (out,)))

    return tables[0].nbytes, ColdCalls(bind, tables)


def choice_elements_per_s(quick: bool) -> float:
    """Logits per second of the greedy choice of tokens for eight sequences, on the CPU as the runtime makes it."""
    logits = torch.ones(8, 32768, dtype=torch.bfloat16)
    timed: dict[tuple, Sequence[Call]] = {("aten",): [lambda: most_likely(logits)]}
    return logits.numel() / call_times_s(timed, 9 if quick else 15)["aten",]
