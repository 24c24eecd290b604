"""Time the kernels that steps are made of: products by rows and size, attention, and both beside reads from disk.

On the CPU, that is; `measure_cuda` times a GPU's, in the same turns.

Whatever is compared takes turns, round by round, and one number of the rounds counts (`settled_s`): on a machine with
neighbours a second can be slow as a whole, and must not fall on one candidate alone.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from forebay.kernels.attention.operations import attention_flops
from forebay.kernels.formats.packing import Packing
from forebay.kernels.formats.table import TIMED_WEIGHTS, CacheFormat, packed_caches, packed_format
from forebay.kernels.operator import HOST_KERNELS, ROUNDED, Call, Operator, Product, Tensors
from forebay.kernels.operators import ATTENTION, find, product_with
from forebay.rewriter.machine.points import AttentionPoint, GemmPoint, intensity
from forebay.runtime.measure.steady import settled_s, steady_times
from forebay.runtime.run.arena import Arena
from forebay.runtime.run.sampling import most_likely

MIB = 1 << 20
GEMM_M = (1, 2, 4, 8, 16, 32, 64, 256)
QUICK_M = (1, 4, 16, 64, 256)
QUICK_S = 6.0  # for all kinds of products: on a machine in use the rounds are fewer
GEMM_SHAPES = ((2048, 2048), (256, 512), (4096, 512), (1024, 1024), (5632, 2048), (1024, 4096))  # (n, k)
QUICK_SHAPES = 3  # as few as the three coefficients of a product need
COLD_NBYTES = 64 * MIB  # products take turns over weights of this total, more than the caches: streamed ones are cold
HOPELESS = 2.5  # an implementation so many times slower than the best of its kind is timed once: nobody chooses it
BURST_S = 1e-3  # calls shorter than this are timed several at a time
READ_NBYTES = 8 * MIB
# (batch, queries, tokens seen) over 8 heads of 64 for K and V, twice as many for queries
ATTENTION_SHAPES = ((1, 1, 128), (8, 1, 128), (32, 1, 128), (1, 1, 4096), (8, 1, 1024), (1, 64, 64), (8, 64, 64),
                    (1, 64, 1024), (1, 256, 512))
KV_HEADS, HEADS, HEAD_DIM = 8, 16, 64

TimedProduct = tuple[str, int, Sequence[Call]]  # implementation, rows of x, calls over weights outside the caches


def burst_s(turn: Iterator[Call], count: int) -> float:
    """Seconds of one of the next `count` calls on this thread."""
    calls = [next(turn) for _ in range(count)]
    start = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start) / count


def call_s(turn: Iterator[Call], count: int) -> float:
    """Seconds of one of the next `count` calls (`settled_s`), each timed alone: on a busy machine some of a burst are
    interrupted for milliseconds, and would hide the others in a mean."""
    times = []
    for _ in range(count):
        call = next(turn)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return settled_s(times)


def call_times_s(
    timed: dict[tuple, Sequence[Call]], rounds: int, burst_s: Callable[[Iterator[Call], int], float] = call_s,
    limit_s: float = math.inf,
) -> dict[tuple, float]:
    """Seconds of one call of each entry (`settled_s`), over `rounds` rounds in which all take their turn.

    Keys are (implementation, what it does, …). The calls of an entry are used in rotation; one is made before anything
    is timed. `burst_s` gives the seconds of one of so many calls. No round begins after `limit_s`, but for the first.
    """
    began_s = time.monotonic()
    turns = {key: itertools.cycle(calls) for key, calls in timed.items()}
    times: dict[tuple, list[float]] = {}
    best: dict[tuple, float] = {}
    for key, turn in turns.items():
        next(turn)()
        times[key] = [burst_s(turn, 1)]
        best[key[1:]] = min(best.get(key[1:], math.inf), times[key][0])
    counts = {key: max(1, min(64, int(BURST_S / found[0]))) for key, found in times.items()}
    rivals = [key for key, found in times.items() if found[0] <= HOPELESS * best[key[1:]]]
    for key in rivals:
        times[key].clear()
    for number in range(rounds):
        if number and time.monotonic() > began_s + limit_s:
            break
        for key in rivals:
            times[key].append(burst_s(turns[key], counts[key]))
    return {key: settled_s(found) for key, found in times.items()}


# Products


def gemm_points(quick: bool, say: Callable[[str, float], None]) -> tuple[GemmPoint, ...]:
    """Times of [m, k] x [n, k]^T on the CPU by every implementation there is, in float32, bfloat16 and packed rows."""
    shapes, rows, rounds = (GEMM_SHAPES[:QUICK_SHAPES], QUICK_M, 5) if quick else (GEMM_SHAPES, GEMM_M, 15)
    return timed_products(("float32", "bfloat16", *TIMED_WEIGHTS), shapes, rounds, partial(_products, rows), say,
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
        timed: dict[tuple, Sequence[Call]] = {}
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
    weights = cold_product_weights(how, n, k, dtype)
    for m in rows:
        x, out = torch.ones(m, k, dtype=dtype), torch.empty(m, n, dtype=dtype)
        shape = Product(kind, m, n, k)
        rounding = (name for wish in ROUNDED for name in operator.implementations.rounding(shape, wish))
        for impl in (*operator.implementations.candidates(kind), *rounding):
            uses = (Tensors((x, weight, None), how, (out,), impl) for weight in weights)
            yield impl, m, [operator.bind[HOST_KERNELS](use) for use in uses]


def product_of(kind: str, k: int, half: torch.dtype) -> tuple[Operator, dict[str, Any], torch.dtype]:
    """The product of weights of a dtype, or of packed rows with x and scales of dtype `half`; how a launch of it says
    what it reads, and x's dtype."""
    operator = product_with(kind)
    stored = packed_format(kind)
    if stored is None:
        return operator, {"form": "nk", "accumulate": False}, getattr(torch, kind)
    return operator, Packing(stored.bits, k, stored.group_size, half, stored.symmetric, stored.codebook)._asdict(), half


def cold_product_weights(how: dict[str, Any], n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Weights for products to take turns over: ones, or packed rows of small scales and lows."""
    if "bits" in how:
        return cold_weights(n, Packing(**how).row_nbytes, torch.uint8).fill_(0x11)
    return cold_weights(n, k, dtype)


def cold_weights(n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Ones [count, n, k] for products to take turns over, in an arena's huge pages as weights are when a plan runs."""
    count = max(2, -(-COLD_NBYTES // (n * k * dtype.itemsize)))
    memory = Arena(count * n * k * dtype.itemsize)
    return memory.bytes.view(dtype).view(count, n, k).fill_(1)


def cold_products(m: int, n: int, k: int, dtype: torch.dtype) -> list[Call]:
    """Products of `m` rows by what a plan would take, one for each of such weights."""
    from forebay.kernels.products.linear import cpu as linear

    x, out = torch.ones(m, k, dtype=dtype), torch.empty(m, n, dtype=dtype)
    impl = linear.default_choice(dtype, m, n, k)
    return [linear.bind_linear(impl, x, weight, None, out) for weight in cold_weights(n, k, dtype)]


# Attention


def attention_points(quick: bool) -> tuple[AttentionPoint, ...]:
    """Times of causal attention by our CPU kernels, over K and V as they are and over packed rows; the new tokens are
    the last that are seen."""
    timed: dict[tuple, Sequence[Call]] = {}
    for kind in ("float32", "bfloat16", *_caches_here()):
        for batch, queries, tokens in ATTENTION_SHAPES:
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


def _attention_calls(kind: str, batch: int, queries: int, tokens: int) -> tuple[int, list[Call]]:
    """Bytes of K and V, of a dtype or of packed rows with bfloat16 queries, and calls over as many of them as are not
    in the caches."""
    packed = packed_caches().get(kind)
    operator = ATTENTION if packed is None else find(packed.attend)
    how = () if packed is None else packed.arguments(HEAD_DIM).values()
    assert operator is not None
    dtype = torch.bfloat16 if packed else getattr(torch, kind)
    width = packed.row_nbytes(HEAD_DIM, dtype.itemsize) if packed else HEAD_DIM
    nbytes = 2 * batch * KV_HEADS * tokens * width * (1 if packed else dtype.itemsize)
    calls: list[Call] = []
    for _ in range(max(2, min(64, COLD_NBYTES // nbytes))):
        q = torch.ones(batch, HEADS, queries, HEAD_DIM, dtype=dtype)
        k, v = (torch.full((batch, KV_HEADS, tokens, width), 0x11 if packed else 1,
                           dtype=torch.uint8 if packed else dtype) for _ in range(2))  # 0x11: small scales
        out = torch.empty(batch, queries, HEADS, HEAD_DIM, dtype=dtype)
        start = torch.full((batch,), tokens - queries)
        calls.append(operator.bind[HOST_KERNELS](Tensors((q, k, v, start, HEAD_DIM**-0.5, 0, 0.0, *how), {}, (out,))))
    return nbytes, calls


def pack_elements_per_s(quick: bool) -> dict[str, float]:
    """Values per second that our CPU kernels make packed rows of a cache of, by format."""
    batch, tokens = 8, 32
    k, v = torch.randn(2, batch, KV_HEADS, tokens, HEAD_DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    timed: dict[tuple, Sequence[Call]] = {}
    for name, (packed, append) in _caches_here().items():
        keys, values = torch.zeros(
            2, batch, KV_HEADS, tokens, packed.row_nbytes(HEAD_DIM, k.element_size()), dtype=torch.uint8)
        start = torch.zeros(batch, dtype=torch.int64)
        given = keys, values, k, v, start, *packed.arguments(HEAD_DIM).values()
        timed["flat", name] = [append.bind[HOST_KERNELS](Tensors(given, {}, ()))]
    return {name: 2 * k.numel() / t for (_, name), t in call_times_s(timed, 9 if quick else 15).items()}


def choice_elements_per_s(quick: bool) -> float:
    """Logits per second of the greedy choice of tokens for eight sequences, on the CPU as the runtime makes it."""
    logits = torch.ones(8, 32768, dtype=torch.bfloat16)
    timed: dict[tuple, Sequence[Call]] = {("aten",): [lambda: most_likely(logits)]}
    return logits.numel() / call_times_s(timed, 9 if quick else 15)["aten",]
