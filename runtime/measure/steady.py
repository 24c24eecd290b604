"""Times that noise does not spoil: one number of many repetitions, and another measurement where no line fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median
from typing import TypeVar

from forebay.rewriter.machine.fits import fit_link, fit_times
from forebay.rewriter.machine.quality import GOOD_R2

TRIES = 3
CALM = 1.15  # medians up to so many times the fastest repetition come of a machine that nobody else used
Key = TypeVar("Key", bound=Hashable)
Timed = TypeVar("Timed")


def settled_s(times_s: Sequence[float]) -> float:
    """Return the one time that stands for many repetitions of the same work.

    The median on a calm machine. Others that use the cores only ever add time, so where the median is more than CALM
    times the fastest repetition, the fastest counts.
    """
    least, middle = min(times_s), median(times_s)
    return middle if middle <= CALM * least else least


def settled_rate(rates: Sequence[float]) -> float:
    """Return the one rate that stands for many repetitions: `settled_s` of their inverse."""
    return 1 / settled_s([1 / max(rate, 1e-9) for rate in rates])


def steady_link(
    sizes: Sequence[int], rounds: int, time_s: Callable[[int, int], float], tries: int | None = None
) -> tuple[float, float, float]:
    """`fit_link` of the medians of `time_s(size, turn)`, all sizes taking turns, of the first of up to `tries` passes
    (TRIES) that is good, or of all passes so far together if they are.

    Where none is, the link is as it was seen in most turns, and R² the best fit's: the rate of the largest transfers
    and the time of the smallest."""
    best, seen = -math.inf, {size: list[float]() for size in sizes}
    for _ in range(tries or TRIES):
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
    line: Callable[[Key], tuple[Hashable, tuple[float, ...]]], tries: int | None = None,
) -> dict[Key, float]:
    """Measure each entry of `timed`, up to `tries` (TRIES) times for those on a line that fits poorly: the best fit
    counts. `line` says on which line an entry lies, and where, as `fit_times` takes it. Lines of which `measure` gives
    nothing are not asked for again."""
    found = dict(measure(dict(timed)))
    for _ in range((tries or TRIES) - 1):
        before = _fits(found, line)
        again = {key: what for key, what in timed.items() if before.get(line(key)[0], 1.0) < GOOD_R2}
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
