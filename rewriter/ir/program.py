"""The `Program`: the lowered form of a graph, one flat list that runtime, verifier and simulator all read.

Order of the list is the order of issue. Items on one stream run in that order; across streams only `Record` and `Wait`
order them, as CUDA events do: a Wait refers to the latest Record of its event that stands before it in the list.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, dataclass_transform

from forebay.rewriter.ir.alignment import GATHER_NBYTES, PAGE_NBYTES

T = TypeVar("T")
COMPUTE, DISK, UPLOAD = "compute", "disk", "upload"  # streams: kernels; file reads; host -> device copies
LOOKUP = "lookup"  # reads of single rows, which must not queue behind the long reads of weights
LOAD = "load"  # reads of spill files, which must not queue behind them either
DOWNLOAD, WRITE = "download", "write"  # the outward streams: device -> host copies; writes of spill files
ATTEND = "attend"  # kernels of the host beside the device, over caches and experts in its memory
COLLECT = "collect"  # collectives with other ranks, over memory of the device
RETURN = "return"  # host -> device copies of caches and results: weights that a step before issued are on UPLOAD
READS = (DISK, LOOKUP, LOAD)
UNORDERED = (*READS, WRITE)  # streams on which copies finish in any order
UPWARD = (UPLOAD, RETURN)  # streams that share the link from host memory to the device
MOVES = (*UPWARD, DOWNLOAD)  # streams of copies between both
DEVICE, HOST = "device", "host"  # arenas, named after their tier


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """A small immutable value with slots. Immutable by its type: assigning to a field is an error to the type checker,
    not at run time, where the check would make each of the ten thousands of items of a Program four times dearer."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


@record
class Span:
    """Bytes [offset, offset + nbytes) of an arena or a spill file, holding (part of) the buffer `buffer`."""

    arena: str
    offset: int
    nbytes: int
    buffer: str


@record
class TensorRef:
    """A strided view of arena memory: `offset` in bytes of the first element, `stride` in elements."""

    arena: str
    offset: int
    dtype: str  # torch dtype without the prefix: "float32"
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    buffer: str


@record
class Band:
    """From `offset` on `count` rows, `stride` bytes apart: of each the pieces (offset in the row, nbytes). They lie in
    the file `path`; where that is "", in the file of the slice."""

    offset: int
    count: int
    stride: int
    pieces: tuple[tuple[int, int], ...]
    path: str = ""

    @property
    def row_nbytes(self) -> int:
        """Bytes of the pieces of a row."""
        return sum(nbytes for _, nbytes in self.pieces)

    @property
    def has_gaps(self) -> bool:
        """Whether its bytes do not lie one after the other, row by row."""
        return len(self.pieces) != 1 or self.pieces[0][0] != 0 or (self.count > 1 and self.stride != self.row_nbytes)

    def part(self, first: int, end: int, path: str) -> Band:
        """The bytes [first, end) of it; ValueError, naming `path`, where a row with gaps is cut."""
        row = self.row_nbytes
        if not self.has_gaps:
            return Band(self.offset + first, 1, end - first, ((0, end - first),), self.path)
        if first % row or end % row:
            raise ValueError(f"{self.path or path}: bytes [{first}, {end}) cut a row of {row} bytes")
        return Band(self.offset + first // row * self.stride, (end - first) // row, self.stride, self.pieces, self.path)


@record
class FileSlice:
    """Bytes of a file that is only read, on the disk tier: those from `offset` on, or the pieces of `bands`, which
    count from there, one after the other."""

    path: str
    offset: int
    nbytes: int
    bands: tuple[Band, ...] = ()

    def part(self, lower: int, nbytes: int) -> FileSlice:
        """`nbytes` of these bytes from number `lower` on. ValueError where a row with gaps is cut."""
        if not self.bands:
            return FileSlice(self.path, self.offset + lower, nbytes)
        found, at = [], 0
        for band in self.bands:
            size = band.count * band.row_nbytes
            first, end = (min(max(0, edge - at), size) for edge in (lower, lower + nbytes))
            at += size
            if first < end:
                found.append(band.part(first, end, self.path))
        return FileSlice(self.path, self.offset, nbytes, tuple(found))

    def rows(self, row_nbytes: int) -> Callable[[int], FileSlice]:
        """Return a function that gives each row of so many bytes, without reading earlier rows."""
        starts = [0, *itertools.accumulate(band.count * band.row_nbytes for band in self.bands)]

        def row(number: int) -> FileSlice:
            lower = number * row_nbytes
            if not self.bands:
                return self.part(lower, row_nbytes)
            first, end = bisect_right(starts, lower) - 1, bisect_left(starts, lower + row_nbytes)
            near = FileSlice(self.path, self.offset, starts[end] - starts[first], self.bands[first:end])
            return near.part(lower - starts[first], row_nbytes)

        return row

    @property
    def slices(self) -> int:
        """Reads that it takes: bands that meet in their file come in one, and pieces with little between them."""
        found, end = 0, ("", -1)
        for band in self.bands:
            path, apart = band.path or self.path, band.stride - band.row_nbytes > GATHER_NBYTES
            found += (band.count - 1 if apart else 0) + ((path, band.offset + band.pieces[0][0]) != end)
            end = path, band.offset + (band.count - 1) * band.stride + sum(band.pieces[-1])
        return max(1, found)

    @property
    def paths(self) -> set[str]:
        """The files that its bytes lie in."""
        return {band.path or self.path for band in self.bands} or {self.path}

    @property
    def page_offset(self) -> int:
        """Return the best offset in a page for memory of these bytes: most of them then lie there as they do in their
        file, which lets direct reads bring them without a copy."""
        if not self.bands:
            return self.offset % PAGE_NBYTES
        found, at = Counter[int](), 0
        for band in self.bands:
            nbytes = band.count * band.row_nbytes
            found[(self.offset + band.offset + band.pieces[0][0] - at) % PAGE_NBYTES] += nbytes
            at += nbytes
        return found.most_common(1)[0][0]

    def by_file(self) -> Iterator[tuple[int, FileSlice]]:
        """The bytes in runs that lie in one file each: where a run begins among all, and the run."""
        at = 0
        for path, group in itertools.groupby(self.bands, key=lambda band: band.path or self.path):
            bands = tuple(group)
            nbytes = sum(band.count * band.row_nbytes for band in bands)
            yield at, FileSlice(path, self.offset, nbytes, bands)
            at += nbytes
        if not self.bands:
            yield 0, self


@record
class Rows:
    """The rows of `table` that int64 tensors name when the copy runs; its other end lies densely, row after row.

    Row i of the other end is row index[i] of the table (without `index`: row i); where `skips`, one with a negative
    number is left out. With `count` [1] only the first count[0] rows are moved. What is left out keeps what it held in
    a table; in a dense end it is undefined, unless the copy `keeps` it, which then must hold something. The proof takes
    all of both ends to be touched, except by those who go by a tensor that the copy `spares`: what told it its rows
    tells these other places (`check_items`). `typical` is the share that predictions count. Rows that begin so many
    bytes `apart` (0: densely) do not lie one after the other, but each in its room where it lies in the pages of its
    file. `alike`: the table has row i of the other end as its own row i; `index` says only which are left out.
    """

    table: FileSlice | Span
    row_nbytes: int
    index: TensorRef | None = None
    count: TensorRef | None = None
    skips: bool = False
    typical: float = 1.0
    keeps: bool = False
    apart: int = 0
    spares: tuple[TensorRef, ...] = ()
    alike: bool = False

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self.table.nbytes // self.row_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all rows that may be moved."""
        return self.row_nbytes * self._most

    @property
    def room_nbytes(self) -> int:
        """Bytes of the dense end."""
        return (self.apart or self.row_nbytes) * self._most

    @property
    def _most(self) -> int:
        return self.rows if self.index is None else math.prod(self.index.shape)

    @property
    def index_tensors(self) -> tuple[TensorRef, ...]:
        """The tensors that say which rows."""
        return tuple(ref for ref in (self.index, self.count) if ref is not None)


SCRATCH = "scratch"  # what launches share of temporaries, in `held` of a Launch; devices take it ahead


@record
class Launch:
    """Run `op` on `stream`. `args` are TensorRefs and constants; everything it touches stands in reads and writes."""

    stream: str
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: tuple[TensorRef, ...]
    reads: tuple[Span, ...]
    writes: tuple[Span, ...]
    label: str
    layer: int = -1
    flops: int = 0
    workspace_nbytes: int = 0  # transient memory the op takes outside the arenas
    impl: str = ""  # matrix products: the implementation the plan chose
    held: tuple[tuple[str, int], ...] = ()  # bytes outside the arenas that are kept from then on: launches share a name


@record
class Copy:
    """Move bytes of `src` into `dst`. `room` bytes before and after dst (within its slot, or its pages of a spill file)
    may be overwritten (direct I/O)."""

    stream: str
    src: FileSlice | Rows | Span
    dst: Rows | Span
    label: str
    layer: int = -1
    room: tuple[int, int] = (0, 0)


@record
class Record:
    """Event `event` is complete when everything issued to `stream` before this point is."""

    stream: str
    event: int


@record
class Wait:
    """Nothing issued to `stream` after this point starts before the latest Record of `event` is complete."""

    stream: str
    event: int


@record
class Release:
    """The contents of `span` end here on `stream`: whatever reads them later is an error."""

    stream: str
    span: Span


Item = Launch | Copy | Record | Wait | Release


@dataclass(frozen=True)
class Program:
    """One lowered step. `prologue` issues the copies that a step expects in flight; each step issues them anew at its
    end for the next step, so that prologue, step, step, … is the sequence that runs."""

    name: str
    step: tuple[Item, ...]
    prologue: tuple[Item, ...]
    arenas: dict[str, int]  # nbytes of each arena
    resident: dict[str, Span]  # buffers that hold valid contents before the first step: weights, constants, cache
    inputs: dict[str, TensorRef] = field(default_factory=dict)
    outputs: dict[str, TensorRef] = field(default_factory=dict)
    once: bool = False  # the step runs a single time: memory need not be left as it was found
    files: dict[str, int] = field(default_factory=dict)  # nbytes of each spill file; spans name them as they do arenas
    seen: dict[int, float] = field(default_factory=dict)  # tokens that predictions let so many queries attend to
    in_place: frozenset[str] = frozenset()  # buffers of host memory that launches of the device reach where they lie

    def items(self, steps: int = 1) -> Iterator[Item]:
        """Prologue and `steps` steps, as they are issued."""
        yield from self.prologue
        for _ in range(steps):
            yield from self.step

    def streams(self) -> tuple[str, ...]:
        """Names of the streams used, in order of first use."""
        return tuple(dict.fromkeys(item.stream for item in self.items()))

    def streamed_nbytes(self) -> int:
        """Bytes that one step copies out of files by fixed slices (row lookups not counted)."""
        return sum(i.src.nbytes for i in self.step if isinstance(i, Copy) and isinstance(i.src, FileSlice))

    def link_nbytes(self, steps: int = 1, started: bool = True) -> dict[tuple[str, str], int]:
        """Bytes that `steps` steps copy from tier to tier, at most where rows are told at run time; with the prologue
        where they are the first (`started`: not)."""
        found: dict[tuple[str, str], int] = {}
        for items, times in ((self.step, steps), (self.prologue, 0 if started else 1)):
            for item in items if times else ():
                if isinstance(item, Copy):
                    link = tier_of(item.src), tier_of(item.dst)
                    found[link] = found.get(link, 0) + times * copy_nbytes(item)
        return found

    def moved_nbytes(self) -> int:
        """Bytes of weights that one step copies into staging slots on the device, from wherever they are kept, and into
        pools, as predictions count these."""
        return sum(i.dst.nbytes for i in self.step
                   if isinstance(i, Copy) and isinstance(i.dst, Span) and i.dst.arena == DEVICE
                   and i.dst.buffer.startswith("slot")) + round(sum(
                       i.src.typical * i.src.nbytes for i in self.step
                       if isinstance(i, Copy) and isinstance(i.src, Rows) and i.src.keeps))

    def workspace_nbytes(self, tier: str = DEVICE) -> int:
        """Most memory of a tier that launches take outside the arenas at a time, those of the prologue among them."""
        return workspace_nbytes(self.launches(), tier)

    def held_nbytes(self) -> dict[str, int]:
        """Bytes outside the arenas that its launches keep, by name."""
        return held_nbytes(self.launches())

    def launches(self) -> Iterator[Launch]:
        """The launches of prologue and step."""
        return (item for item in self.items() if isinstance(item, Launch))


def held_nbytes(launches: Iterable[Launch]) -> dict[str, int]:
    """Bytes outside the arenas that launches keep, by name: as many as the largest of them."""
    held = dict[str, int]()
    for launch in launches:
        for name, nbytes in launch.held:
            held[name] = max(held.get(name, 0), nbytes)
    return held


def workspace_nbytes(launches: Iterable[Launch], tier: str = DEVICE) -> int:
    """Bytes of a tier that launches take outside the arenas: the largest transient memory, and all that is kept. Those
    on the host's stream, which run beside the device's, take theirs of the host."""
    known = tuple(launch for launch in launches if (launch.stream == ATTEND) == (tier == HOST))
    return max((launch.workspace_nbytes for launch in known), default=0) + sum(held_nbytes(known).values())


def place_of(end: FileSlice | Rows | Span) -> FileSlice | Span:
    """The bytes at an end of a copy: a table whole."""
    return end.table if isinstance(end, Rows) else end


def tier_of(end: FileSlice | Rows | Span) -> str:
    """The tier at an end of a copy: device, host or disk."""
    place = place_of(end)
    return place.arena if isinstance(place, Span) and place.arena in (DEVICE, HOST) else "disk"


def copy_nbytes(copy: Copy) -> int:
    """Bytes that a copy moves, at most."""
    return (copy.src if isinstance(copy.src, Rows) else copy.dst).nbytes


def dtype_itemsize(dtype: str) -> int:
    """Bytes per element of a torch dtype name."""
    import torch

    return getattr(torch, dtype).itemsize


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a new tensor."""
    return tuple(math.prod(max(1, s) for s in shape[i + 1 :]) for i in range(len(shape)))


def span_of(ref: TensorRef) -> Span:
    """The smallest byte range that holds every element of `ref`."""
    itemsize = dtype_itemsize(ref.dtype)
    if 0 in ref.shape:
        return Span(ref.arena, ref.offset, 0, ref.buffer)
    last = sum((size - 1) * stride for size, stride in zip(ref.shape, ref.stride, strict=True))
    return Span(ref.arena, ref.offset, (last + 1) * itemsize, ref.buffer)
