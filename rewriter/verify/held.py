"""Whose contents memory holds while a Program is proved: runs that launches alone touch, and segments of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from forebay.rewriter.ir.program import Copy, Item, Launch, Rows, Span


class Segment:
    """One indivisible byte range: whose contents it holds, who wrote them, and the last read on each stream."""

    __slots__ = ("beside", "copied", "owner", "reads", "write_at", "write_stream")

    def __init__(self) -> None:
        self.owner: str | None = None
        self.write_stream = self.write_at = 0  # position 0: never written
        self.beside: tuple[tuple[int, int], ...] = ()  # streams and positions of copies that could still write then
        self.copied = False  # last written by a Copy and not read since
        self.reads: dict[int, int] = {}  # by stream the position of the last read since the write, which is behind all


    def under_way(self, clock: list[int]) -> tuple[tuple[int, int], ...]:
        """Streams and positions of those who may still write when `clock` says what is over."""
        return tuple((stream, at) for stream, at in (*self.beside, (self.write_stream, self.write_at))
                     if at > clock[stream])


def apart(
    item: Item, issued: Sequence[Sequence[Item | None]], writers: Iterable[tuple[int, int]], writes: bool
) -> bool:
    """Return whether `item` touches the same bytes of a range as none of `writers`, of those `issued` by stream and
    position, which may be under way: it is a copy that spares the rows they bring, or a launch that reads where they
    spare any (`Rows`)."""
    for stream, at in writers:
        each = issued[stream][at]
        if type(each) is not Copy or type(each.src) is not Rows:
            return False
        if writes and not (type(item) is Copy and type(item.src) is Rows and each.src.index in item.src.spares):
            return False
        if not writes and not (type(item) is Launch and item.kwargs.get("entries") in each.src.spares):
            return False
    return True


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


def difference(before: dict[str, list[str | None]], after: dict[str, list[str | None]]) -> str:
    """Return the memory whose owner changed."""
    for arena, owners in before.items():
        for a, b in zip(owners, after[arena], strict=True):
            if a != b:
                return f"{arena} held {a or 'nothing'}, now holds {b or 'nothing'}"
    return "nothing differs"
