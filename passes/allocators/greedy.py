"""Greedy allocators: quick, never worse than one buffer after another, usually at or near the lower bound."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from forebay.passes.allocators import native
from forebay.passes.allocators.bounds import compress
from forebay.passes.allocators.problem import Buffer

Greedy = Callable[[Sequence[Buffer], float], list[int] | None]  # seconds that it may take; None: they were too few
COMPILED_FROM = 2000  # buffers: below, first fit takes less than 50 ms in Python


def by_size(buffers: Sequence[Buffer], limit_s: float = math.inf) -> list[int] | None:
    """Offsets from first fit, largest buffer first (Pisarchyk and Lee 2020, "greedy by size")."""
    return _first_fit(buffers, sorted(range(len(buffers)), key=lambda i: (-buffers[i].size, buffers[i].lower, i)),
                      limit_s)


def by_area(buffers: Sequence[Buffer], limit_s: float = math.inf) -> list[int] | None:
    """Offsets from first fit, largest lifetime × size first."""
    return _first_fit(buffers, sorted(range(len(buffers)), key=lambda i: (-_lifetime(buffers[i]) * buffers[i].size, i)),
                      limit_s)


def by_tall_area(buffers: Sequence[Buffer], limit_s: float = math.inf) -> list[int] | None:
    """Offsets from first fit, largest √lifetime × size first: between the two above."""
    key = [math.sqrt(_lifetime(buffer)) * buffer.size for buffer in buffers]
    return _first_fit(buffers, sorted(range(len(buffers)), key=lambda i: (-key[i], i)), limit_s)


def by_breadth(buffers: Sequence[Buffer], limit_s: float = math.inf) -> list[int] | None:
    """Offsets from first fit, those live at the fullest moment first (breadth), of these the longest-lived."""
    if not buffers:
        return []
    sections = compress(buffers)
    change = np.zeros(sections.count + 1, dtype=np.int64)
    sizes = np.array([buffer.size for buffer in buffers], dtype=np.int64)
    np.add.at(change, np.array(sections.lower), sizes)
    np.subtract.at(change, np.array(sections.upper), sizes)
    live = np.cumsum(change)
    spans = zip(sections.lower, sections.upper, strict=True)
    fullest = [int(live[lower:upper].max()) for lower, upper in spans]
    return _first_fit(buffers, sorted(range(len(buffers)), key=lambda i: (-fullest[i], -_lifetime(buffers[i]), i)),
                      limit_s)


def best_fit(buffers: Sequence[Buffer], limit_s: float = math.inf) -> list[int] | None:
    """Offsets from the tightest free gap at the time each buffer starts, larger buffers first among equal starts."""
    n = len(buffers)
    order = sorted(range(n), key=lambda i: (buffers[i].lower, -buffers[i].size, i))
    library = _compiled(buffers)
    if library is not None:  # n log n: no limit is needed
        found = np.zeros(n, dtype=np.int64)
        library.forebay_best_fit(native.BufferColumns(buffers), native.pointer(np.array(order, dtype=np.int32)),
                                 native.pointer(found))
        return found.tolist()
    live = _Placed(n)
    offsets = [0] * n
    end = time.perf_counter() + limit_s
    for i in order:
        buffer = buffers[i]
        live.drop_ended(buffer.lower)
        offsets[i] = live.tightest_gap(buffer.size)
        live.insert(buffer, offsets[i])
        if time.perf_counter() > end:
            return None
    return offsets


def around(buffers: Sequence[Buffer], fixed: Mapping[int, int], limit_s: float = math.inf) -> list[int] | None:
    """Offsets from first fit, largest first, of the buffers that `fixed` gives no offset yet."""
    order = sorted(range(len(buffers)), key=lambda i: (-buffers[i].size, buffers[i].lower, i))
    return _first_fit(buffers, order, limit_s, fixed)


def _lifetime(buffer: Buffer) -> int:
    return buffer.upper - buffer.lower


def _compiled(buffers: Sequence[Buffer]) -> ctypes.CDLL | None:
    return native.load() if len(buffers) >= COMPILED_FROM else None


def _first_fit(
    buffers: Sequence[Buffer], order: Sequence[int], limit_s: float, fixed: Mapping[int, int] | None = None
) -> list[int] | None:
    """Place buffers in `order`, each in the lowest gap among those already placed, or `fixed`, that meet it in time."""
    offsets = np.full(len(buffers), -1, dtype=np.int64)
    for i, offset in (fixed or {}).items():
        offsets[i] = offset
    library = _compiled(buffers)
    if library is not None:
        done = library.forebay_first_fit(native.BufferColumns(buffers), native.pointer(np.array(order, dtype=np.int32)),
                                         min(limit_s, native.FOREVER_S), native.pointer(offsets))
        return offsets.tolist() if done else None
    placed = _Placed(len(buffers))
    for i in fixed or ():
        placed.insert(buffers[i], int(offsets[i]))
    end = time.perf_counter() + limit_s
    for i in order:
        if offsets[i] < 0:
            offsets[i] = placed.lowest_gap(buffers[i])
            placed.insert(buffers[i], int(offsets[i]))
        if time.perf_counter() > end:
            return None
    return offsets.tolist()


class _Placed:
    """Placed buffers as four int64 rows (offset, top, lower, upper), kept sorted by offset."""

    def __init__(self, capacity: int) -> None:
        self.rows = np.zeros((4, capacity), dtype=np.int64)
        self.count = 0

    def insert(self, buffer: Buffer, offset: int) -> None:
        at = int(np.searchsorted(self.rows[0, : self.count], offset))
        self.rows[:, at + 1 : self.count + 1] = self.rows[:, at : self.count]
        self.rows[:, at] = offset, offset + buffer.size, buffer.lower, buffer.upper
        self.count += 1

    def drop_ended(self, time: int) -> None:
        """Forget buffers that are no longer live at `time`."""
        kept = self.rows[3, : self.count] > time
        live = int(np.count_nonzero(kept))
        if live < self.count:
            self.rows[:, :live] = self.rows[:, : self.count][:, kept]
            self.count = live

    def lowest_gap(self, buffer: Buffer) -> int:
        """Lowest offset at which `buffer` meets nothing placed."""
        _, _, lower, upper = self.rows[:, : self.count]
        meets = np.flatnonzero((lower < buffer.upper) & (upper > buffer.lower))
        if not meets.size:
            return 0
        starts, tops = self.rows[0, meets], np.maximum.accumulate(self.rows[1, meets])
        if starts[0] >= buffer.size:
            return 0
        wide = starts[1:] - tops[:-1] >= buffer.size
        at = int(wide.argmax()) if wide.size else 0
        return int(tops[at]) if wide.size and wide[at] else int(tops[-1])

    def tightest_gap(self, size: int) -> int:
        """Offset of the smallest gap between the placed, all of them live, that holds `size`; else above all."""
        starts = self.rows[0, : self.count]
        floors = np.concatenate(([0], self.rows[1, : self.count]))
        gaps = starts - floors[:-1]
        gaps[gaps < size] = np.iinfo(np.int64).max
        if gaps.size and gaps.min() < np.iinfo(np.int64).max:
            return int(floors[int(gaps.argmin())])
        return int(floors[-1])
