"""Neither local search nor other orders make a packing worse, and thousands of buffers are searched too."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from forebay.kernels.build import compile
from forebay.passes.allocators import Allocation, Buffer, allocate, check, lower_bound, neighbourhoods, squeaky_wheel
from forebay.passes.allocators.greedy import by_area
from forebay.passes.allocators.select import GREEDY

WITH_COMPILER = pytest.mark.skipif(compile.compiler() is None, reason="no C++ compiler on this machine")
CAPACITY = 1 << 20
GRAIN = 1024  # bytes, and time steps, that cuts fall on
SPANS = st.tuples(st.integers(0, 20), st.integers(1, 8), st.integers(1, 30))  # begin, lifetime, bytes


def packed(n: int, seed: int) -> list[Buffer]:
    """`n` buffers that fit CAPACITY without a gap: random guillotine cuts of bytes and of time."""
    rng = random.Random(seed)
    cells = [(0, CAPACITY, 0, CAPACITY)]
    while len(cells) < n:
        areas = [(upper - lower) * (top - base) for lower, upper, base, top in cells]
        at = rng.choices(range(len(cells)), areas)[0]
        lower, upper, base, top = cells[at]
        across = rng.random() < 0.5
        extent = (top - base if across else upper - lower) // GRAIN
        if extent < 2:
            continue
        cut = (base if across else lower) + GRAIN * rng.randint(1, extent - 1)
        cells[at] = (lower, upper, base, cut) if across else (lower, cut, base, top)
        cells.append((lower, upper, cut, top) if across else (cut, upper, base, top))
    rng.shuffle(cells)
    return [Buffer(str(i), lower, upper, top - base) for i, (lower, upper, base, top) in enumerate(cells)]


def height_of(buffers: list[Buffer], offsets: list[int] | None) -> int:
    assert offsets is not None
    return max((o + b.size for o, b in zip(offsets, buffers, strict=True)), default=0)


def reordered(buffers: list[Buffer], offsets: list[int], target: int, limit_s: float, *, seed: int) -> list[int]:
    return squeaky_wheel.improve(buffers, offsets, target, limit_s, threading.Event(), seed=seed)


@WITH_COMPILER
@pytest.mark.parametrize("improve", [neighbourhoods.improve, reordered])
@settings(max_examples=examples(60), deadline=None)
@given(spans=st.lists(SPANS, max_size=40), seed=st.integers(0, 1 << 60))
def test_neither_ends_above_where_it_began(
    improve: Callable[..., list[int]], spans: list[tuple[int, int, int]], seed: int
) -> None:
    buffers = [Buffer(str(i), lower, lower + life, size) for i, (lower, life, size) in enumerate(spans)]
    before = by_area(buffers)
    assert before is not None
    found = improve(buffers, before, lower_bound(buffers), 0.005, seed=seed)
    height = height_of(buffers, found)
    check(buffers, Allocation(tuple(found), height, 0, "", 0))
    assert lower_bound(buffers) <= height <= height_of(buffers, before)


def drawn(n: int, seed: int) -> list[Buffer]:
    """Lives of up to a twentieth of the time, of any length below, and any size up to a megabyte."""
    rng = random.Random(seed)
    begins = [rng.randrange(10_000) for _ in range(n)]
    return [Buffer(str(i), begin, begin + rng.randint(1, 500), rng.randint(1 << 10, 1 << 20))
            for i, begin in enumerate(begins)]


@WITH_COMPILER
def test_other_orders_of_many_buffers_come_out_below_every_greedy_one() -> None:
    buffers = drawn(2000, 0)
    heights = {height_of(buffers, place(buffers)): place for place in GREEDY.values()}
    least = min(heights)
    target = least - (least - lower_bound(buffers)) // 3
    found = squeaky_wheel.improve(buffers, heights[least](buffers) or (), target, 120.0, threading.Event())
    check(buffers, Allocation(tuple(found), height_of(buffers, found), 0, "", 0))
    assert height_of(buffers, found) <= target < least


@WITH_COMPILER
def test_other_orders_end_when_enough_is_found() -> None:
    buffers, enough = drawn(2000, 0), threading.Event()
    first = by_area(buffers)
    assert first is not None
    enough.set()
    assert squeaky_wheel.improve(buffers, first, 1, 120.0, enough) == first


@WITH_COMPILER
def test_neighbourhoods_of_many_buffers_reach_the_bound() -> None:
    """Few live together: whatever first fit leaves above the bound, its neighbours can be laid out anew."""
    rng, buffers, now = random.Random(0), [], 0
    for i in range(20_000):
        begin, now = max(0, now - rng.randint(0, 2)), now + rng.randint(2, 10)
        buffers.append(Buffer(str(i), begin, now, rng.randint(1 << 10, 1 << 20)))
    rng.shuffle(buffers)
    first = by_area(buffers)
    assert height_of(buffers, first) > 1.1 * lower_bound(buffers)
    found = allocate(buffers, time_limit_s=120.0)
    check(buffers, found)
    assert found.height == found.lower_bound and found.method == "neighbourhoods"


@WITH_COMPILER
def test_thousands_of_tiles_are_searched() -> None:
    """A round of the search places all of them, and comes out far below first fit."""
    buffers = packed(2000, 0)
    assert min(height_of(buffers, place(buffers)) for place in GREEDY.values()) > 1.25 * CAPACITY
    found = allocate(buffers, capacity=int(1.2 * CAPACITY), time_limit_s=120.0)
    check(buffers, found)
    assert found.height <= 1.2 * CAPACITY and found.lower_bound == CAPACITY
