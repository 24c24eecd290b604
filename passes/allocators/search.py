"""Exact search: is there an allocation of at most a given height? Compiled where possible, in Python otherwise."""

from __future__ import annotations

import ctypes
import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from forebay.passes.allocators import native
from forebay.passes.allocators.bounds import Sections, compress
from forebay.passes.allocators.problem import Buffer

MAX_BUFFERS = 8000  # depth of the compiled recursion stays within an 8 MB stack; placing all once takes 10 s
MAX_PAIRS = 2_000_000  # (buffer, section) pairs: about 40 MB; beyond it a node costs milliseconds


class Verdict(enum.Enum):
    """Why a search ended without offsets."""

    IMPOSSIBLE = "no allocation fits the capacity"
    UNDECIDED = "the time ran out, or the problem is too large to search"


def search(buffers: Sequence[Buffer], capacity: int, time_limit_s: float, *, seed: int = 1) -> list[int] | Verdict:
    """Offsets of at most `capacity` bytes height, or why there are none; every buffer must be live and not empty.

    Building the compiled search, once per machine and some seconds long, does not count against the time limit.
    """
    if not buffers:
        return []
    sections = compress(buffers)
    pairs = sum(upper - lower for lower, upper in zip(sections.lower, sections.upper, strict=True))
    if len(buffers) > MAX_BUFFERS or pairs > MAX_PAIRS:
        return Verdict.UNDECIDED
    library = native.load()
    if library is None:
        return search_in_python(buffers, capacity, time_limit_s)
    return _search_compiled(library, buffers, sections, capacity, time_limit_s, seed)


def _search_compiled(
    library: ctypes.CDLL,
    buffers: Sequence[Buffer],
    sections: Sections,
    capacity: int,
    time_limit_s: float,
    seed: int,
) -> list[int] | Verdict:
    n = len(buffers)
    lower, upper = np.array(sections.lower, dtype=np.int32), np.array(sections.upper, dtype=np.int32)
    sizes, offsets = np.array([buffer.size for buffer in buffers], dtype=np.int64), np.zeros(n, dtype=np.int64)
    nodes = ctypes.c_int64()
    found = library.forebay_search(
        n, sections.count, native.pointer(lower), native.pointer(upper), native.pointer(sizes), capacity, time_limit_s,
        seed, native.pointer(offsets), ctypes.byref(nodes),
    )  # fmt: skip
    if found == 1:
        return offsets.tolist()
    return Verdict.IMPOSSIBLE if found == 0 else Verdict.UNDECIDED


@dataclass
class _SearchState:
    """Floors per section, and the unplaced buffers; search.cpp explains the terms."""

    floors: list[int]
    unplaced: frozenset[int]
    placed: dict[int, int] = field(default_factory=dict)


def search_in_python(buffers: Sequence[Buffer], capacity: int, time_limit_s: float) -> list[int] | Verdict:
    """The branching of search.cpp with one fixed strategy: for machines without a C++ compiler, and small problems."""
    sections = compress(buffers)
    spans = [range(lower, upper) for lower, upper in zip(sections.lower, sections.upper, strict=True)]
    sizes = [buffer.size for buffer in buffers]
    live: list[list[int]] = [[] for _ in range(sections.count)]
    for i, span in enumerate(spans):
        for s in span:
            live[s].append(i)
    end = time.perf_counter() + time_limit_s
    failed: set[tuple[frozenset[int], tuple[int, ...]]] = set()
    stack = [_SearchState([0] * sections.count, frozenset(range(len(buffers))))]
    while stack:  # depth first; the most promising child is pushed last
        if time.perf_counter() > end:
            return Verdict.UNDECIDED
        state = stack.pop()
        if not state.unplaced:
            return [state.placed[i] for i in range(len(buffers))]
        earliest = _settle(state, live, spans, sizes, capacity)
        key = (state.unplaced, tuple(state.floors))
        if earliest is None or key in failed:
            continue
        failed.add(key)  # its children stay on the stack: meeting the state again adds nothing
        stack += _children(state, earliest, live, spans, sizes)
    return Verdict.IMPOSSIBLE


def _settle(
    state: _SearchState, live: list[list[int]], spans: list[range], sizes: list[int], capacity: int
) -> dict[int, int] | None:
    """Raise floors to the least earliest offset above them until nothing moves; None when a section cannot fit."""
    while True:
        earliest = {i: max(state.floors[s] for s in spans[i]) for i in state.unplaced}
        moved = False
        for s, members in enumerate(live):
            starts = sorted((earliest[i], sizes[i]) for i in members if i in state.unplaced)
            if not starts:
                state.floors[s] = 0  # nothing will be placed here: equal states must compare equal
                continue
            top = 0
            for start, size in starts:
                top = max(top, start) + size
            if top > capacity:
                return None
            moved |= starts[0][0] > state.floors[s]
            state.floors[s] = starts[0][0]
        if not moved:
            return earliest


def _children(
    state: _SearchState, earliest: dict[int, int], live: list[list[int]], spans: list[range], sizes: list[int]
) -> list[_SearchState]:
    """The branches on a section of the lowest valley, largest buffer last."""
    open_sections = [s for s in range(len(live)) if any(i in state.unplaced for i in live[s])]
    section = min(open_sections, key=lambda s: (state.floors[s], sum(i in state.unplaced for i in live[s])))
    height = state.floors[section]
    here = [i for i in live[section] if i in state.unplaced]
    candidates = sorted((i for i in here if earliest[i] == height), key=lambda i: len(spans[i]) * sizes[i])
    children = []
    beside = [earliest[i] + sizes[i] for i in state.unplaced if section not in spans[i]]
    later = [*beside, *(earliest[i] for i in here if earliest[i] > height)]
    if later:
        floors = state.floors.copy()
        floors[section] = min(later)
        children.append(_SearchState(floors, state.unplaced, state.placed))
    for i in candidates:
        floors = state.floors.copy()
        for s in spans[i]:
            floors[s] = height + sizes[i]
        children.append(_SearchState(floors, state.unplaced - {i}, state.placed | {i: height}))
    return children
