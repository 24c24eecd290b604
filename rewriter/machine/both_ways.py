"""The slowdown of reads and writes next to each other on a disk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BothWays:
    """How many times as long writes of `nbytes` and reads take side by side on the disk as each alone."""

    nbytes: int
    write_slowed: float
    read_slowed: float


def side_by_side(points: Sequence[BothWays], nbytes: int) -> tuple[float, float]:
    """Return how many times as long a write of `nbytes` takes beside reads, and reads beside it: between measured
    sizes, which rise, on a log scale; without any they share the disk evenly."""
    if not points:
        return 2.0, 2.0
    low = [x for x in points if x.nbytes <= nbytes][-1:] or [points[0]]
    high = [x for x in points if x.nbytes >= nbytes][:1] or [points[-1]]
    a, b = low[0], high[0]
    share = math.log(nbytes / a.nbytes) / math.log(b.nbytes / a.nbytes) if a.nbytes < b.nbytes else 0.0
    return (a.write_slowed + share * (b.write_slowed - a.write_slowed),
            a.read_slowed + share * (b.read_slowed - a.read_slowed))
