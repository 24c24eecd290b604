"""Local search from a packing: buffers of some moments are put back in another order; improve.cpp has it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forebay.passes.allocators import native
from forebay.passes.allocators.problem import Buffer


def improve(
    buffers: Sequence[Buffer], offsets: Sequence[int], target: int, limit_s: float, *, seed: int = 1
) -> list[int]:
    """Offsets of no greater height than that of `offsets`, of `target` bytes at the least, after at most so many
    seconds; `offsets` themselves where there is no compiler."""
    library = native.load()
    if library is None or not buffers:
        return list(offsets)
    found = np.array(offsets, dtype=np.int64)
    library.forebay_improve(native.BufferColumns(buffers), target, limit_s, seed, native.pointer(found))
    return found.tolist()
