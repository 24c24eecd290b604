"""The static allocation problem: buffers with given lifetimes, an allocation, its check, and its CSV form."""

from __future__ import annotations

import csv
import io
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay.rewriter.ir.files import open_input, written_whole

COLUMNS = ("id", "lower", "upper", "size")


@dataclass(frozen=True, slots=True)
class Buffer:
    """`size` bytes that are live in the half-open interval `[lower, upper)`; an empty interval is never live."""

    id: str
    lower: int
    upper: int
    size: int

    def __post_init__(self) -> None:
        if self.upper < self.lower:
            raise ValueError(f"buffer {self.id!r}: lifetime [{self.lower}, {self.upper}) ends before it starts")
        if self.size < 0:
            raise ValueError(f"buffer {self.id!r}: size {self.size} is negative")


@dataclass(frozen=True, slots=True)
class Allocation:
    """One byte offset per buffer, in the order of the buffers, and how good it is.

    `height` is the number of bytes to reserve, a multiple of the alignment. `lower_bound` is a height no allocation can
    go below: the peak of live bytes, or more where the search proved more. `method` names the allocator that won.
    """

    offsets: tuple[int, ...]
    height: int
    lower_bound: int
    method: str
    time_s: float


def padded(size: int, alignment: int) -> int:
    """`size` bytes rounded up to a multiple of `alignment` bytes."""
    return -(-size // alignment) * alignment


def occupied(buffer: Buffer) -> bool:
    """Return whether the buffer takes any byte at any time; one that does not may lie anywhere."""
    return buffer.size > 0 and buffer.lower < buffer.upper


def _describe(buffer: Buffer, offset: int) -> str:
    return f"{buffer.id!r} at bytes [{offset}, {offset + buffer.size}) live in [{buffer.lower}, {buffer.upper})"


def check(buffers: Sequence[Buffer], allocation: Allocation, alignment: int = 1) -> None:
    """Prove by a sweep over time that no two live buffers share a byte and that all fit aligned below the height.

    Shares no code with the allocators. Raises ValueError naming the buffers, their bytes and their lifetimes.
    """
    if len(allocation.offsets) != len(buffers):
        raise ValueError(f"{len(allocation.offsets)} offsets for {len(buffers)} buffers")
    events: list[tuple[int, int, int]] = []  # at one time, ends (0) come before starts (1): lifetimes are half open
    for i, (buffer, offset) in enumerate(zip(buffers, allocation.offsets, strict=True)):
        if offset < 0 or offset % alignment:
            raise ValueError(f"buffer {_describe(buffer, offset)}: the offset is not a multiple of {alignment}")
        if not occupied(buffer):
            continue
        if offset + buffer.size > allocation.height:
            raise ValueError(f"buffer {_describe(buffer, offset)} ends above the height {allocation.height}")
        events += [(buffer.lower, 1, i), (buffer.upper, 0, i)]
    events.sort()
    live: list[tuple[int, int]] = []  # (offset, index), disjoint and sorted
    for _, starts, i in events:
        entry = (allocation.offsets[i], i)
        at = bisect_left(live, entry)
        if not starts:
            del live[at]
            continue
        for _, j in live[max(at - 1, 0) : at + 1]:
            low, high = sorted((i, j), key=lambda k: allocation.offsets[k])
            if allocation.offsets[low] + buffers[low].size > allocation.offsets[high]:
                pair = " and ".join(_describe(buffers[k], allocation.offsets[k]) for k in (low, high))
                raise ValueError(f"live buffers overlap: {pair}")
        live.insert(at, entry)


def read_csv(path: str | Path) -> list[Buffer]:
    """Read buffers from a file with the header `id,lower,upper,size` (an `offset` column is allowed and ignored).

    Raises ValueError with the line number for a missing column, a malformed line or an id seen before.
    """
    with io.TextIOWrapper(open_input(path), newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file)
        header = [name.strip() for name in next(rows, [])]
        missing = [name for name in COLUMNS if name not in header]
        if missing:
            raise ValueError(f"{path}:1: no column {', '.join(missing)}; the header must be {','.join(COLUMNS)}")
        at = [header.index(name) for name in COLUMNS]
        buffers: list[Buffer] = []
        seen: dict[str, int] = {}
        for row in rows:
            where = f"{path}:{rows.line_num}"
            if not row:
                continue
            if len(row) != len(header):
                raise ValueError(f"{where}: {len(row)} fields, the header has {len(header)}")
            name, *numbers = (row[i].strip() for i in at)
            if name in seen:
                raise ValueError(f"{where}: id {name!r} was already given in line {seen[name]}")
            try:
                lower, upper, size = map(_whole, numbers, COLUMNS[1:])
                buffers.append(Buffer(name, lower, upper, size))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            seen[name] = rows.line_num
    return buffers


def _whole(text: str, column: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{column} must be a whole number, found {text!r}") from None


def write_csv(path: str | Path, buffers: Sequence[Buffer], offsets: Sequence[int] | None = None) -> None:
    """Write buffers as `id,lower,upper,size`, with an `offset` column when offsets are given."""
    with written_whole(path, newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS if offsets is None else (*COLUMNS, "offset"))
        places: list[tuple[int, ...]] = [()] * len(buffers) if offsets is None else [(offset,) for offset in offsets]
        for buffer, place in zip(buffers, places, strict=True):
            writer.writerow((buffer.id, buffer.lower, buffer.upper, buffer.size, *place))
