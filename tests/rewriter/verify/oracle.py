"""The proof once more, independent of `verify_program` and slow: steps unrolled, every pair of accesses compared.

Memory is looked at granule by granule, order is the transitive closure of an explicit graph, and nothing is summed up
in clocks. What both must agree on is which Programs are refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from forebay.rewriter.ir.program import (
    COMPUTE,
    UNORDERED,
    Copy,
    Item,
    Launch,
    Program,
    Record,
    Release,
    Span,
    Wait,
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


def check(program: Program) -> None:
    """Raise Refused unless every byte of `program`, run for STEPS steps, is read and written in one order only."""
    sizes = {**program.arenas, **program.files}
    memory = {(arena, at): Memory() for arena, nbytes in sizes.items() for at in range(0, nbytes, GRANULE)}
    order = Order()
    for span in program.resident.values():
        for byte in _bytes(span, sizes):
            if memory[byte].owner not in (None, span.buffer):
                raise Refused("two are kept in one place")
            memory[byte].owner = span.buffer
    for item in program.prologue:
        _do(item, order, memory, sizes)
    before = _owners(memory)
    for _ in range(1 if program.once else STEPS):
        for ref in program.inputs.values():
            _do(Launch(COMPUTE, "", (), {}, (), (), (span_of(ref),), ""), order, memory, sizes)
        for item in program.step:
            _do(item, order, memory, sizes)
        for ref in program.outputs.values():
            _do(Launch(COMPUTE, "", (), {}, (), (span_of(ref),), (), ""), order, memory, sizes)
        kept = {span.buffer for span in program.resident.values()}
        taken = {ref.buffer for ref in program.outputs.values()} - kept
        for cell in memory.values():
            if cell.owner in taken:
                cell.owner = None
        if not program.once and _owners(memory) != before:
            raise Refused("a step leaves other contents")


def _owners(memory: dict[Byte, Memory]) -> dict[Byte, str | None]:
    return {byte: cell.owner for byte, cell in memory.items()}


def _bytes(span: Span, sizes: dict[str, int]) -> Iterator[Byte]:
    if span.arena not in sizes or not 0 <= span.offset <= span.offset + span.nbytes <= sizes[span.arena]:
        raise Refused("outside of its arena")
    return ((span.arena, at) for at in range(span.offset, span.offset + span.nbytes, GRANULE))


def _do(item: Item, order: Order, memory: dict[Byte, Memory], sizes: dict[str, int]) -> None:
    number = order.issue(item)
    if isinstance(item, Release):
        for byte in _bytes(item.span, sizes):
            cell = memory[byte]
            if cell.owner != item.span.buffer or cell.unread:
                raise Refused("released, but it is not there, or was never read")
            cell.owner = None
        return
    if isinstance(item, Launch):
        reads, writes, margins = item.reads, item.writes, ()
    elif isinstance(item, Copy):
        assert isinstance(item.dst, Span)
        reads = (item.src,) if isinstance(item.src, Span) else ()
        (front, back), dst = item.room, item.dst
        writes = (dst,)
        margins = (Span(dst.arena, dst.offset - front, front, dst.buffer),
                   Span(dst.arena, dst.offset + dst.nbytes, back, dst.buffer))
    else:
        return
    over = order.before[number]
    for span in reads:
        for byte in _bytes(span, sizes):
            cell = memory[byte]
            if cell.owner != span.buffer:
                raise Refused("read, but it holds something else")
            if any(not over >> writer & 1 for writer in cell.writers[-1:]):
                raise Refused("read, perhaps before it is written")
            cell.readers.append(number)
            cell.unread = False
    for brought, span in ((isinstance(item, Copy), s) for s in writes):
        _write(span, number, over, memory, sizes, brought, item.stream in UNORDERED)
    for span in margins:
        _write(span, number, over, memory, sizes, False, item.stream in UNORDERED)


def _write(
    span: Span, number: int, over: int, memory: dict[Byte, Memory], sizes: dict[str, int], brought: bool,
    unordered: bool,
) -> None:
    for byte in _bytes(span, sizes):
        cell = memory[byte]
        if cell.owner is not None and (cell.unread or cell.owner != span.buffer):
            raise Refused("written over what still lives, or was never read")
        for other in (*cell.readers, *cell.writers):
            if not over >> other & 1 and (other != number or unordered):
                raise Refused("written while another may still be at it")
        cell.owner, cell.unread = span.buffer, brought
        cell.writers.append(number)
