"""Every allocator in turn, the best result kept, stopping as soon as nothing better can be asked for."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from forebay.passes.allocators import greedy, native, neighbourhoods, squeaky_wheel
from forebay.passes.allocators.bounds import lower_bound
from forebay.passes.allocators.problem import Allocation, Buffer, occupied, padded
from forebay.passes.allocators.search import Verdict, search

GREEDY: dict[str, greedy.Greedy] = {
    "greedy by size": greedy.by_size,
    "greedy by breadth": greedy.by_breadth,
    "greedy by √lifetime × size": greedy.by_tall_area,
    "greedy by lifetime × size": greedy.by_area,
    "best fit over time": greedy.best_fit,
}
FIT_TIME_S = 9.0  # to meet a capacity
MINIMIZE_TIME_S = 3.0  # to lower the height
GOOD_ENOUGH = 0.0005  # of the lower bound: gaps below it are not searched further
MIN_SEARCH_S = 0.05
GAP_SHARE = 0.01  # of the target: gaps above it are worth a pass of their own over the long-lived buffers
LONG = 8  # median lifetimes
LONG_SEARCH_S = 2.0
MANY = 1000  # buffers: from here on one that fits below what is known is searched first, and neighbourhoods last
FIRST_SHARE, TARGET_SHARE, LAST_SHARE = 0.6, 0.25, 0.15  # of the time for these two, and for the target in between
LEAST_PART, STEP_SHARE = 0.125, 0.6  # of the gap that is to go where the target was not met; of the time, for a step


def allocate(
    buffers: Sequence[Buffer],
    *,
    capacity: int | None = None,
    time_limit_s: float | None = None,
    alignment: int = 1,
) -> Allocation:
    """Give every buffer an offset such that buffers live at the same time share no byte.

    Without `capacity` the height is made as small as the time allows, stopping at the lower bound. With `capacity`
    (bytes) the first allocation that fits is returned; when none was found the best one is, with `height > capacity`,
    and `lower_bound > capacity` says that none exists. Offsets and height are multiples of `alignment` bytes. Buffers
    of no bytes or of empty lifetime get offset 0 and do not count. `time_limit_s` defaults to 9 with a capacity and
    to 3 without; the first greedy pass is never cut short. Raises ValueError for an alignment below 1.
    """
    if alignment < 1:
        raise ValueError(f"alignment must be at least 1 byte, not {alignment}")
    if len(buffers) >= greedy.COMPILED_FROM:
        native.load()  # building it does not count against the limit
    started = time.perf_counter()
    if time_limit_s is None:
        time_limit_s = MINIMIZE_TIME_S if capacity is None else FIT_TIME_S
    end = started + time_limit_s
    kept = [i for i, buffer in enumerate(buffers) if occupied(buffer)]
    units = [_in_units(buffers[i], alignment) for i in kept]
    bound = lower_bound(units)
    target = bound if capacity is None else max(bound, capacity // alignment)

    best, height, method = _best_greedy(units, target, end)
    staged = _long_lived_first(units, end) if height > (1 + GAP_SHARE) * target else None
    if staged is not None and _height(units, staged) < height:
        best, height, method = staged, _height(units, staged), "long-lived first"
    if height > target and len(units) > MANY:
        best, height, method = _of_many(units, best, height, method, target, end)
    elif height > target:
        best, height, method, bound = _improve(units, best, height, method, bound, target, end)
    offsets = [0] * len(buffers)
    for i, offset in zip(kept, best, strict=True):
        offsets[i] = offset * alignment
    time_s = time.perf_counter() - started
    return Allocation(tuple(offsets), height * alignment, bound * alignment, method, time_s)


def _in_units(buffer: Buffer, alignment: int) -> Buffer:
    if alignment == 1:
        return buffer
    return Buffer(buffer.id, buffer.lower, buffer.upper, padded(buffer.size, alignment) // alignment)


def _height(buffers: Sequence[Buffer], offsets: Sequence[int]) -> int:
    return max((offset + buffer.size for buffer, offset in zip(buffers, offsets, strict=True)), default=0)


def _best_greedy(buffers: Sequence[Buffer], target: int, end: float) -> tuple[list[int], int, str]:
    """Offsets, height and name of the lowest greedy result; the first that reaches the target ends the row.

    Of many buffers best fit over time comes first, whose time alone does not grow with those that live together.
    """
    best: tuple[list[int], int, str] | None = None
    names = sorted(GREEDY, key=lambda name: len(buffers) > MANY and GREEDY[name] is not greedy.best_fit)
    for name in names:
        left_s = math.inf if best is None else end - time.perf_counter()
        if best and (best[1] <= target or left_s < 0):
            break
        offsets = GREEDY[name](buffers, left_s)
        if offsets is not None and (best is None or _height(buffers, offsets) < best[1]):
            best = offsets, _height(buffers, offsets), name
    assert best is not None
    return best


def _of_many(
    buffers: Sequence[Buffer], best: list[int], height: int, method: str, target: int, end: float
) -> tuple[list[int], int, str]:
    """Offsets, height and method of the lowest of two: first fit in better and better orders, on a thread of its own,
    and searches that a local search follows."""
    enough = threading.Event()
    with ThreadPoolExecutor(1) as others:
        reordered = others.submit(squeaky_wheel.improve, buffers, best, target, end - time.perf_counter(), enough)
        last_s = LAST_SHARE * max(0.0, end - time.perf_counter())
        best, height, method = _descend(buffers, best, height, method, target, end - last_s)
        left_s = end - time.perf_counter()
        if height > target and left_s > MIN_SEARCH_S:
            found = neighbourhoods.improve(buffers, best, target, left_s)
            if _height(buffers, found) < height:
                best, height, method = found, _height(buffers, found), "neighbourhoods"
        if height <= target:
            enough.set()
        found = reordered.result()
    if _height(buffers, found) < height:
        best, height, method = found, _height(buffers, found), "squeaky wheel"
    return best, height, method


def _descend(
    buffers: Sequence[Buffer], best: list[int], height: int, method: str, target: int, end: float
) -> tuple[list[int], int, str]:
    """Offsets, height and method after searches below the height, at the target, and at steps towards it.

    Of what can be searched the first comes out far below first fit whatever its capacity: it places valley by valley.
    """
    part, share = 0.0, FIRST_SHARE  # of the gap to the target that is to go; of the time left
    while height > target and (left_s := end - time.perf_counter()) > MIN_SEARCH_S:
        goal = height - max(1, round(part * (height - target)))
        found = search(buffers, goal, share * left_s)
        if isinstance(found, list):
            best, height, method = found, _height(buffers, found), "exact search"
            part, share = (1.0, TARGET_SHARE) if part == 0.0 else (min(1.0, 2 * part), STEP_SHARE)
        elif part == 0.0 or part * (height - target) < GOOD_ENOUGH * target:
            break
        else:
            part, share = (LEAST_PART if part == 1.0 else part / 2), STEP_SHARE
    return best, height, method


def _long_lived_first(buffers: Sequence[Buffer], end: float) -> list[int] | None:
    """Offsets of the few buffers that outlive most others, found as if they were alone, and first fit around them.

    First fit by itself leaves the long-lived scattered, with gaps between them that fit nothing for long. None where
    there are none, or where they are not few.
    """
    lifetimes = sorted(buffer.upper - buffer.lower for buffer in buffers)
    least = LONG * lifetimes[len(lifetimes) // 2]
    few = [i for i, buffer in enumerate(buffers) if buffer.upper - buffer.lower > least]
    left_s = end - time.perf_counter()
    if not few or len(few) > len(buffers) // 10 or left_s < MIN_SEARCH_S:
        return None
    alone = allocate([buffers[i] for i in few], time_limit_s=min(LONG_SEARCH_S, 0.8 * left_s))
    return greedy.around(buffers, dict(zip(few, alone.offsets, strict=True)), end - time.perf_counter())


def _improve(
    buffers: Sequence[Buffer], best: list[int], height: int, method: str, bound: int, target: int, end: float
) -> tuple[list[int], int, str, int]:
    """Search at the target, then halve the gap between what is proved or given up and what is found.

    Returns offsets, height, method and the lower bound, raised where the search proved that nothing fits.
    """
    given_up = target - 1  # searches at or below this height have failed or run out of time
    goal = target
    share = 1.0 if target > bound else 0.5  # a capacity is all that is asked; a minimum leaves time to bisect
    while height > target and (left_s := end - time.perf_counter()) > MIN_SEARCH_S:
        found = search(buffers, goal, left_s * share)
        if isinstance(found, list):
            best, height, method = found, _height(buffers, found), "exact search"
        else:
            if found is Verdict.IMPOSSIBLE:
                bound = max(bound, goal + 1)
            given_up = goal
        if height - given_up <= 1 + GOOD_ENOUGH * bound:
            break
        goal, share = (given_up + height) // 2, 0.34
    return best, height, method, bound
