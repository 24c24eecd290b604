"""Scratch of the experts' kernels on a GPU."""

from __future__ import annotations

from typing import NamedTuple

ALIGN = 16


class ScratchOffsets(NamedTuple):
    """Offsets in scratch of picks in the order of their entries, their ends by entry, what `down` is given, and what it
    gives; and where that ends."""

    order: int
    ends: int
    given: int
    parts: int
    end: int


def scratch_offsets(picks: int, entries: int, hidden: int, inner: int, itemsize: int) -> ScratchOffsets:
    """Return the scratch offsets for so many picks of a step, over so many entries."""
    at = [0]
    for nbytes in (4 * picks, 4 * entries, picks * inner * itemsize, 4 * picks * hidden):
        at.append(-(-(at[-1] + nbytes) // ALIGN) * ALIGN)
    return ScratchOffsets(*at)
