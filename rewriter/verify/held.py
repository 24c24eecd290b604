"""Whose contents memory holds while a Program is proved: runs that launches alone touch, and segments of the rest."""

from __future__ import annotations

from typing import Any

from forebay.rewriter.ir.program import Item, Span


class Segment:
    """One indivisible byte range: whose contents it holds, who wrote them, and the last read on each stream."""

    __slots__ = ("copied", "owner", "reads", "write_at", "write_stream")

    def __init__(self) -> None:
        self.owner: str | None = None
        self.write_stream = self.write_at = 0  # position 0: never written
        self.copied = False  # last written by a Copy and not read since
        self.reads: dict[int, int] = {}  # by stream the position of the last read since the write, which is behind all


# Owners of an arena's indivisible ranges, which of them (one or a slice), and the buffer meant (for each of a slice).
TouchedRun = tuple[list[str | None], Any, Any]


class Touched:
    """The memory of some spans: of that which launches alone touch, where order is issue order, runs; of the rest its
    segments, and the buffer meant."""

    __slots__ = ("private", "shared", "spans")

    def __init__(self, spans: tuple[Span, ...]) -> None:
        self.spans = spans
        self.private: list[TouchedRun] = []
        self.shared: list[tuple[list[Segment], str]] = []


# Where bytes lie among the cuts of their arena: first indivisible range, end of the last, the segments among them.
Range = tuple[int, int, list[Segment]]
PreparedItem = tuple[Item, int, Touched, Touched]  # the number of its stream, what it reads (or frees) and writes


def buffer_of(run: TouchedRun) -> str:
    meant = run[2]
    return meant if type(meant) is str else meant[0]


def owners_of(run: TouchedRun) -> list[str | None]:
    """Whose contents the ranges of a run hold."""
    owners, where, _ = run
    return owners[where] if type(where) is slice else [owners[where]]
