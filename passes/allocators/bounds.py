"""Bounds that hold before any offset is chosen: the peak of live bytes, and the moments that matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.passes.allocators.problem import Buffer, occupied, padded


@dataclass(frozen=True, slots=True)
class Sections:
    """Buffer `i` is live in sections `[lower[i], upper[i])` of `count`; two buffers meet in time iff they share one."""

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    count: int


def lower_bound(buffers: Sequence[Buffer], alignment: int = 1) -> int:
    """Peak of live bytes, each size rounded up to `alignment`: no allocation has a smaller height."""
    events: list[tuple[int, int]] = []
    for buffer in filter(occupied, buffers):
        nbytes = padded(buffer.size, alignment)
        events += [(buffer.lower, nbytes), (buffer.upper, -nbytes)]
    peak = live = 0
    for _, change in sorted(events):  # at one time frees sort before allocations
        live += change
        peak = max(peak, live)
    return peak


def compress(buffers: Sequence[Buffer]) -> Sections:
    """Cut time into the maximal sets of buffers live together; every other moment's live set is part of one of them.

    All buffers must be live at some time. A section closes at the first end after a start.
    """
    events: list[tuple[int, int, int]] = []
    for i, buffer in enumerate(buffers):
        if buffer.lower >= buffer.upper:
            raise ValueError(f"buffer {buffer.id!r} is never live")
        events += [(buffer.lower, 1, i), (buffer.upper, 0, i)]
    lower, upper = [0] * len(buffers), [0] * len(buffers)
    section, grew = 0, False
    for _, starts, i in sorted(events):
        if starts:
            lower[i], grew = section, True
            continue
        section, grew = section + grew, False
        upper[i] = section
    return Sections(tuple(lower), tuple(upper), section)
