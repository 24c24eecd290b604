"""Measure again what a line does not explain: a second that neighbours took shows as times that fit none."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median
from typing import TypeVar

from forebay.rewriter.machine.fits import fit_link, fit_times
from forebay.rewriter.machine.quality import GOOD_R2

TRIES = 3
Key = TypeVar("Key", bound=Hashable)
Timed = TypeVar("Timed")


def steady_link(
    sizes: Sequence[int], rounds: int, time_s: Callable[[int, int], float]
) -> tuple[float, float, float]:
    """`fit_link` of the medians of `time_s(size, turn)`, all sizes taking turns, of the first of up to TRIES passes
    that is good, or of all passes so far together if they are.

    Where none is, the link is as it was seen in most turns, and R² the best fit's: the rate of the largest transfers
    and the time of the smallest."""
    best, seen = -math.inf, {size: list[float]() for size in sizes}
    for _ in range(TRIES):
        times: dict[int, list[float]] = {size: [] for size in sizes}
        for turn in range(rounds):
            for size in sizes:
                times[size].append(time_s(size, turn))
        for size, found in times.items():
            seen[size] += found
        for each in (times, seen):
            bandwidth, latency, r2 = fit_link([(size, median(found)) for size, found in each.items()])
            if r2 >= GOOD_R2:
                return bandwidth, latency, r2
            best = max(best, r2)
    return max(sizes) / median(seen[max(sizes)]), median(seen[min(sizes)]), best


def steady_times(
    timed: Mapping[Key, Timed], measure: Callable[[dict[Key, Timed]], Mapping[Key, float]],
    line: Callable[[Key], tuple[Hashable, tuple[float, ...]]],
) -> dict[Key, float]:
    """What `measure` gives for each entry of `timed`, up to TRIES times for those on a line that fits poorly: the best
    fit counts. `line` says on which line an entry lies, and where, as `fit_times` takes it."""
    found = dict(measure(dict(timed)))
    for _ in range(TRIES - 1):
        before = _fits(found, line)
        again = {key: what for key, what in timed.items() if before[line(key)[0]] < GOOD_R2}
        if not again:
            break
        new = measure(again)
        after = _fits(new, line)
        found |= {key: time_s for key, time_s in new.items() if after[line(key)[0]] > before[line(key)[0]]}
    return found


def _fits(
    times: Mapping[Key, float], line: Callable[[Key], tuple[Hashable, tuple[float, ...]]]
) -> dict[Hashable, float]:
    """R² by line."""
    points: dict[Hashable, list[tuple[tuple[float, ...], float]]] = {}
    for key, time_s in times.items():
        name, x = line(key)
        points.setdefault(name, []).append((x, time_s))
    return {name: fit_times(found).r2 for name, found in points.items()}
