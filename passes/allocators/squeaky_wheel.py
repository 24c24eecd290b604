"""Squeaky wheel optimization (Joslin and Clements 1999) of first fit: buffers that end above the target are placed
earlier in the next round. What a greedy order leaves on top is what it should have begun with."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from forebay.passes.allocators import native
from forebay.passes.allocators.bounds import compress
from forebay.passes.allocators.problem import Buffer

EXPONENTS = (0.0, 0.25, 0.5, 1.0)  # of the lifetime, in the first orders: size × lifetime^exponent
STEPS = (1.0, 0.3, 0.1)  # what the highest buffer's priority, a logarithm, grows by in a round at most
PATIENCE = 40  # rounds without a lower height, before the next step begins at the best order


def improve(
    buffers: Sequence[Buffer], offsets: Sequence[int], target: int, limit_s: float, enough: threading.Event, *,
    seed: int = 1
) -> list[int]:
    """Offsets of no greater height than that of `offsets`, of `target` bytes at the least, within `limit_s` seconds.

    `offsets` themselves where there is no compiler. It ends when no step lowers the height, or soon after `enough` is
    set.
    """
    library = native.load()
    if library is None or not buffers:
        return list(offsets)
    end, rng = time.perf_counter() + limit_s, np.random.default_rng(seed)
    sections = compress(buffers)
    lifetime = np.log(np.array(sections.upper) - np.array(sections.lower))
    size = np.array([buffer.size for buffer in buffers], dtype=np.int64)
    columns = native.BufferColumns(buffers)
    best = np.array(offsets, dtype=np.int64)
    height = int((best + size).max())
    first, lowest = np.log(size), int(size.sum()) + 1  # the best priorities of all rounds, and their height

    def tops_of(priority: np.ndarray) -> np.ndarray | None:
        """Ends of the buffers placed in this order, whose best are kept; None once time is over."""
        nonlocal best, height, first, lowest
        found = np.full(len(buffers), -1, dtype=np.int64)
        order = np.argsort(-priority, kind="stable").astype(np.int32)
        left_s = 0.0 if enough.is_set() else end - time.perf_counter()
        if left_s <= 0 or not library.forebay_first_fit(columns, native.pointer(order), left_s, native.pointer(found)):
            return None
        tops = found + size
        top = int(tops.max())
        if top < lowest:
            first, lowest = priority, top
        if top < height:
            best, height = found, top
        return tops

    for exponent in EXPONENTS:
        if tops_of(np.log(size) + exponent * lifetime) is None:
            return best.tolist()
    before = height + 1
    while target < height < before:
        before = height
        for step in STEPS:
            priority, least, idle = first, lowest, 0
            while idle < PATIENCE and height > target:
                if (tops := tops_of(priority)) is None:
                    return best.tolist()
                least, idle = lowest, 0 if lowest < least else idle + 1
                blame = np.maximum(0.0, (tops - target) / max(1, int(tops.max()) - target))
                priority = priority + step * blame * rng.uniform(size=len(buffers))
    return best.tolist()
