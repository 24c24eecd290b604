"""Bytes that a planned step moves."""

from __future__ import annotations

from typing import Any


def moved_nbytes(lm: Any, tokens: int) -> tuple[float, float]:
    """Bytes that a step in the middle of its phase reads from the disk and writes to it, as planned."""
    crossing = crossing_nbytes(lm, tokens)
    read = sum(nbytes for way, nbytes in crossing.items() if way.startswith("disk->"))
    return read, sum(nbytes for way, nbytes in crossing.items() if way.endswith("->disk"))


def crossing_nbytes(lm: Any, tokens: int) -> dict[str, float]:
    """Bytes that a step in the middle of its phase moves over each link ("host->device"), as planned."""
    from forebay.rewriter.ir.program import Copy, Rows, copy_nbytes, tier_of

    moved: dict[str, float] = {}
    for item in lm.steps.program(tokens).step:
        if isinstance(item, Copy):
            typical = min((end.typical for end in (item.src, item.dst) if isinstance(end, Rows)), default=1.0)
            way = f"{tier_of(item.src)}->{tier_of(item.dst)}"
            moved[way] = moved.get(way, 0.0) + typical * copy_nbytes(item)
    return moved
