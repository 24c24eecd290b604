"""The proof once more, independent of `verify_program` and slow: steps unrolled, every pair of accesses compared.

Memory is looked at cell by cell, order is the transitive closure of an explicit graph, and nothing is summed up in
clocks. What both must agree on is which Programs are refused. Cells are granules; of a real Program, whose arenas have
too many, what lies between two places where any span begins or ends.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

from forebay.rewriter.ir.program import (
    COMPUTE,
    DOWNLOAD,
    UNORDERED,
    WRITE,
    Copy,
    Item,
    Launch,
    Program,
    Record,
    Release,
    Rows,
    Span,
    TensorRef,
    Wait,
    place_of,
    span_of,
)

STEPS = 3
GRANULE = 16  # every span of the Programs that are compared begins and ends at a multiple
Byte = tuple[str, int]


class Refused(Exception):
    """Why a Program could go wrong."""


class Memory:
    """One granule: whose contents it holds, whether they were copied there and not read, all who ever touched it."""

    def __init__(self) -> None:
        self.owner: str | None = None
        self.unread = False
        self.writers: list[int] = []
        self.readers: list[int] = []


class Order:
    """Which of the items issued so far are over when a later one begins, as bits."""

    def __init__(self) -> None:
        self.before: list[int] = []  # by item: all that precede it, itself not among them
        self.stream: dict[str, list[int]] = {}
        self.waits: dict[str, int] = {}  # by stream: what its waits so far ordered before what follows
        self.recorded: dict[int, int] = {}  # by event: all that is over once it is complete

    def issue(self, item: Item) -> int:
        number, stream = len(self.before), item.stream
        issued = self.stream.setdefault(stream, [])
        known = self.waits.get(stream, 0)
        ordered = stream not in UNORDERED or not isinstance(item, Copy)
        if ordered:
            for other in issued if isinstance(item, Record) or stream not in UNORDERED else []:
                known |= self.before[other] | 1 << other
        if isinstance(item, Wait):
            if item.event not in self.recorded:
                raise Refused(f"nothing recorded event {item.event}")
            known |= self.recorded[item.event]
            self.waits[stream] = self.waits.get(stream, 0) | known
        if isinstance(item, Record):
            self.recorded[item.event] = known
        self.before.append(known)
        issued.append(number)
        return number


class Cells:
    """Where the memory of a Program is cut, every `granule` bytes or (0) where any of its spans begins or ends; and
    what each cell holds."""

    def __init__(self, program: Program, granule: int) -> None:
        self.sizes = {**program.arenas, **program.files}
        places = {arena: {0} for arena in self.sizes}
        for span in () if granule else _all_spans(program):
            places.setdefault(span.arena, {0}).update((span.offset, span.offset + span.nbytes))
        self.edges = {arena: list(range(0, nbytes, granule)) if granule else sorted(places[arena])
                      for arena, nbytes in self.sizes.items()}
        self.memory = {(arena, i): Memory() for arena, edges in self.edges.items() for i in range(len(edges))}
        self.kept = {span.buffer for span in program.resident.values()}
        self.step = 0
        self.labels: list[str] = []  # by item: what it is, and in which step
        self.items: list[Item] = []
        self.flow: set[tuple[str, frozenset[str]]] = set()
        self.updates: set[str] = set()  # labels of items that write over contents of the same name

    def of(self, span: Span) -> Iterator[Memory]:
        """The cells of a span."""
        begin, end = span.offset, span.offset + span.nbytes
        if span.arena not in self.sizes or not 0 <= begin <= end <= self.sizes[span.arena]:
            raise Refused("outside of its arena")
        edges = self.edges[span.arena]
        first, last = (bisect.bisect_left(edges, at) for at in (begin, end))
        return (self.memory[span.arena, i] for i in range(first, last))

    def owners(self) -> dict[Byte, str | None]:
        return {byte: cell.owner for byte, cell in self.memory.items()}


def _all_spans(program: Program) -> Iterator[Span]:
    yield from program.resident.values()
    yield from (span_of(ref) for ref in (*program.inputs.values(), *program.outputs.values()))
    for item in (*program.prologue, *program.step):
        if isinstance(item, Release):
            yield item.span
        elif isinstance(item, Launch | Copy):
            for spans in _touched(item):
                yield from spans


def _touched(item: Launch | Copy) -> tuple[Iterable[Span], Iterable[Span], Iterable[Span]]:
    """What an item reads, what it writes, and what it may spoil around that."""
    if isinstance(item, Launch):
        return item.reads, item.writes, ()
    source, dst, (front, back) = place_of(item.src), place_of(item.dst), item.room
    assert isinstance(dst, Span)
    told = [span_of(ref) for end in (item.src, item.dst) if isinstance(end, Rows) for ref in end.index_tensors]
    margins = (Span(dst.arena, dst.offset - front, front, dst.buffer),
               Span(dst.arena, dst.offset + dst.nbytes, back, dst.buffer))
    return [*told, *([source] if isinstance(source, Span) else ())], (dst,), margins


Flow = frozenset[tuple[str, frozenset[str]]]


def flow(program: Program) -> Flow:
    """`check` of a real Program; what each item reads that runs, and whose writes it finds there: the same for two
    Programs that compute the same of the same."""
    return check(program, granule=0)


def updates(program: Program) -> set[str]:
    """Labels of the items of a real Program that write, in its first step, where contents of the name they give lie
    already."""
    return _unrolled(program, 0).updates


def check(program: Program, granule: int = GRANULE) -> Flow:
    """Raise Refused unless every byte of `program`, run for STEPS steps, is read and written in one order only."""
    return frozenset(_unrolled(program, granule).flow)


def _unrolled(program: Program, granule: int) -> Cells:
    cells, order = Cells(program, granule), Order()
    for span in program.resident.values():
        for cell in cells.of(span):
            if cell.owner not in (None, span.buffer):
                raise Refused("two are kept in one place")
            cell.owner = span.buffer
    for item in program.prologue:
        _do(item, order, cells)
    before = cells.owners()
    for _ in range(1 if program.once else STEPS):
        cells.step += 1
        for ref in program.inputs.values():
            _do(Launch(COMPUTE, "", (), {}, (), (), (span_of(ref),), ""), order, cells)
        for item in program.step:
            _do(item, order, cells)
        for ref in program.outputs.values():
            _do(Launch(COMPUTE, "", (), {}, (), (span_of(ref),), (), ""), order, cells)
        taken = {ref.buffer for ref in program.outputs.values()} - cells.kept
        for cell in cells.memory.values():
            if cell.owner in taken:
                cell.owner = None
        if not program.once and cells.owners() != before:
            raise Refused("a step leaves other contents")
    return cells


def _do(item: Item, order: Order, cells: Cells) -> None:
    number = order.issue(item)
    label = item.label if isinstance(item, Launch | Copy) else type(item).__name__
    cells.labels.append(f"{label} of step {cells.step}")
    cells.items.append(item)
    if isinstance(item, Release):
        for cell in cells.of(item.span):
            if cell.owner != item.span.buffer or cell.unread:
                raise Refused("released, but it is not there, or was never read")
            last = max(cell.writers, default=-1)
            if any(reader > last and not order.before[number] >> reader & 1 for reader in cell.readers):
                raise Refused("released while another may still read it")
            cell.owner = None
        return
    if not isinstance(item, Launch | Copy):
        return
    reads, writes, margins = _touched(item)
    over = order.before[number]
    found: set[str] = set()
    for span in reads:
        for cell in cells.of(span):
            found |= {f"{span.buffer} by {cells.labels[writer]}" for writer in cell.writers[-1:]}
            if cell.owner != span.buffer:
                raise Refused("read, but it holds something else")
            if any(not over >> writer & 1 and not _places(item) & _spared(cells.items[writer])
                   for writer in cell.writers):
                raise Refused("read, perhaps before it is written")
            cell.readers.append(number)
            cell.unread = False
    for span in writes:
        if cells.step <= 1 and any(cell.owner == span.buffer for cell in cells.of(span)):
            cells.updates.add(item.label)
        if isinstance(item, Copy) and (isinstance(item.dst, Rows) or getattr(item.src, "keeps", False)) and any(
                cell.owner != span.buffer for cell in cells.of(span)):
            raise Refused("written in part, but the rest holds something else")
        # what is brought must be read; what is taken out may update what is kept
        brought = isinstance(item, Copy) and not (item.stream in (DOWNLOAD, WRITE) and span.buffer in cells.kept)
        _write(span, number, over, cells, brought, item.stream in UNORDERED, item)
    for span in margins:
        _write(span, number, over, cells, False, item.stream in UNORDERED)
    cells.flow.add((cells.labels[number], frozenset(found)))


def _places(item: Item) -> set[TensorRef]:
    """What says at which places of a table an item alone is, if anything does."""
    named = item.kwargs.get("entries") if isinstance(item, Launch) else item.src.index if (
        isinstance(item, Copy) and isinstance(item.src, Rows)) else None
    return set() if named is None else {named}


def _spared(item: Item | None) -> set[TensorRef]:
    """What names places at which a copy brings nothing."""
    return set(item.src.spares) if isinstance(item, Copy) and isinstance(item.src, Rows) else set()


def _write(
    span: Span, number: int, over: int, cells: Cells, brought: bool, unordered: bool, item: Item | None = None
) -> None:
    for cell in cells.of(span):
        elsewhere = {other for other in cell.writers if other != number and not over >> other & 1
                     and _spared(item) & _places(cells.items[other])}
        if cell.owner is not None and (cell.owner != span.buffer or (cell.unread and not elsewhere)):
            raise Refused("written over what still lives, or was never read")
        for other in (*cell.readers, *cell.writers):
            if not over >> other & 1 and (other != number or unordered) and other not in elsewhere:
                raise Refused("written while another may still be at it")
        cell.owner, cell.unread = span.buffer, brought
        cell.writers.append(number)
