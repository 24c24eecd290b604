"""Prove a `Program` safe before it runs, from the flat list alone.

The proof covers prologue and two steps, so it holds for any number of them (each step starts in the state that the
prologue leaves, and must leave it again). Happens-before is tracked with vector clocks over streams and events.
Reads from the disk complete out of order, so a copy on the disk stream is ordered before another item only by a Record
after it and a Wait on that Record.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from forebay.rewriter.program import (
    COMPUTE,
    UNORDERED,
    Copy,
    FileRows,
    Item,
    Launch,
    Program,
    Record,
    Release,
    Span,
    Wait,
    span_of,
)


class ProgramError(RuntimeError):
    """A Program that could go wrong; the message names the item, the buffer and the two conflicting intervals."""


@dataclass(slots=True)
class _Segment:
    """One indivisible byte range: whose contents it holds, who wrote them, who has read them since."""

    owner: str | None
    write: tuple[str, int, str] | None = None  # stream, sequence number, label
    copied: bool = False  # last written by a Copy and not read since
    reads: dict[str, tuple[int, str]] = field(default_factory=dict)


def verify_program(program: Program, budget: Mapping[str, int | None] | None = None) -> None:
    """Raise ProgramError unless every read follows the write it needs, no bytes are reused while someone may still
    touch them, all spans lie in their arenas, every load is read, every release is single, every wait has its record,
    the steady state repeats, and arenas plus workspace fit the budget (bytes per arena; None or absent: no limit)."""
    _check_sizes(program, budget or {})
    state = _State(program)
    for item in program.prologue:
        state.visit(item)
    before = state.owners()
    for _ in range(2):
        state.take_inputs(program)
        for item in program.step:
            state.visit(item)
        state.hand_over(program)
        if state.owners() != before:
            raise ProgramError(f"{program.name}: a step does not leave the memory as the next step expects it: "
                               f"{_difference(before, state.owners())}")


def _check_sizes(program: Program, budget: Mapping[str, int | None]) -> None:
    for arena, nbytes in program.arenas.items():
        limit = budget.get(arena)
        total = nbytes + (program.workspace_nbytes() if arena == "device" else 0)
        if limit is not None and total > limit:
            raise ProgramError(f"{program.name}: {arena} needs {total} bytes (arena {nbytes} and workspace "
                               f"{total - nbytes}), the budget is {limit}")


class _State:
    def __init__(self, program: Program) -> None:
        self.name = program.name
        cuts: dict[str, set[int]] = {arena: {0, nbytes} for arena, nbytes in program.arenas.items()}
        spans: Iterable[Span] = list(program.resident.values())
        results = [span_of(ref) for ref in program.outputs.values()]
        for group in (spans, results, *(_touched(item) for item in (*program.prologue, *program.step))):
            for span in group:
                if span.arena not in cuts:
                    raise ProgramError(f"{self.name}: {span.buffer} lies in the unknown arena {span.arena!r}")
                if span.offset < 0 or span.offset + span.nbytes > program.arenas[span.arena]:
                    raise ProgramError(f"{self.name}: {span.buffer} [{span.offset}, {span.offset + span.nbytes}) "
                                       f"leaves the arena {span.arena} of {program.arenas[span.arena]} bytes")
                cuts[span.arena] |= {span.offset, span.offset + span.nbytes}
        self.cuts = {arena: sorted(points) for arena, points in cuts.items()}
        self.segments = {arena: [_Segment(None) for _ in points] for arena, points in self.cuts.items()}
        self.ranges: dict[Span, list[_Segment]] = {}
        self.clocks: dict[str, dict[str, int]] = {}
        self.counts: dict[str, int] = {}
        self.events: dict[int, dict[str, int]] = {}
        for span in program.resident.values():
            for segment in self.covered(span):
                if segment.owner not in (None, span.buffer):
                    raise ProgramError(f"{self.name}: {span.buffer} and {segment.owner} are both kept at "
                                       f"{span.arena} [{span.offset}, {span.offset + span.nbytes})")
                segment.owner = span.buffer

    def covered(self, span: Span) -> list[_Segment]:
        found = self.ranges.get(span)
        if found is None:
            points = self.cuts[span.arena]
            lower = bisect_left(points, span.offset)
            upper = bisect_left(points, span.offset + span.nbytes)
            found = self.ranges[span] = self.segments[span.arena][lower:upper]
        return found

    def owners(self) -> dict[str, list[str | None]]:
        return {arena: [s.owner for s in segments] for arena, segments in self.segments.items()}

    def take_inputs(self, program: Program) -> None:
        """Between steps the caller writes the inputs, on the compute stream."""
        sequence = self.counts[COMPUTE] = self.counts.get(COMPUTE, 0) + 1
        clock = self.clocks.setdefault(COMPUTE, {})
        for name, ref in program.inputs.items():
            self.write(span_of(ref), COMPUTE, sequence, clock, f"the caller's {name}", False)
        clock[COMPUTE] = sequence

    def hand_over(self, program: Program) -> None:
        """Between steps the caller takes the outputs; their memory is free in the next step."""
        for ref in program.outputs.values():
            for segment in self.covered(span_of(ref)):
                if segment.owner != ref.buffer:
                    raise ProgramError(f"{self.name}: the output {ref.buffer} is overwritten by {segment.owner}")
        taken = {ref.buffer for ref in program.outputs.values()} - set(program.resident)
        for segments in self.segments.values():
            for segment in segments:
                if segment.owner in taken:
                    segment.owner = None

    def visit(self, item: Item) -> None:
        stream = item.stream
        clock = self.clocks.setdefault(stream, {})
        if isinstance(item, Wait):
            seen = self.events.get(item.event)
            if seen is None:
                raise ProgramError(f"{self.name}: {stream} waits for event {item.event}, which nothing recorded before")
            for other, count in seen.items():
                if clock.get(other, 0) < count:
                    clock[other] = count
            return
        if isinstance(item, Record):
            self.events[item.event] = {**clock, stream: self.counts.get(stream, 0)}
            return
        if isinstance(item, Release):
            self.release(item)
            return
        sequence = self.counts[stream] = self.counts.get(stream, 0) + 1
        for span in _reads(item):
            self.read(span, stream, sequence, clock, item.label)
        for span in _writes(item):
            self.write(span, stream, sequence, clock, item.label, isinstance(item, Copy) and span is item.dst)
        if stream not in UNORDERED:
            clock[stream] = sequence

    def read(self, span: Span, stream: str, sequence: int, clock: dict[str, int], label: str) -> None:
        for segment in self.covered(span):
            if segment.owner != span.buffer:
                raise ProgramError(f"{self.name}: {label} reads {_at(span)}, which holds "
                                   f"{segment.owner or 'nothing'} by then")
            if segment.write is not None and clock.get(segment.write[0], 0) < segment.write[1]:
                raise ProgramError(f"{self.name}: {label} on {stream} reads {_at(span)} without waiting for "
                                   f"{segment.write[2]} on {segment.write[0]}")
            segment.reads[stream] = (sequence, label)
            segment.copied = False

    def write(self, span: Span, stream: str, sequence: int, clock: dict[str, int], label: str, copy: bool) -> None:
        for segment in self.covered(span):
            if segment.copied and segment.owner is not None:
                raise ProgramError(f"{self.name}: {label} overwrites {segment.owner}, loaded and never read")
            for other, (count, reader) in segment.reads.items():
                if (other != stream or stream in UNORDERED) and clock.get(other, 0) < count:
                    raise ProgramError(f"{self.name}: {label} on {stream} overwrites {_at(span)} while {reader} on "
                                       f"{other} may still read {segment.owner} there")
            if segment.write is not None and clock.get(segment.write[0], 0) < segment.write[1] and (
                    segment.write[0] != stream or stream in UNORDERED):
                raise ProgramError(f"{self.name}: {label} on {stream} overwrites {_at(span)} while "
                                   f"{segment.write[2]} on {segment.write[0]} may still write there")
            if segment.owner not in (None, span.buffer):
                raise ProgramError(f"{self.name}: {label} writes {_at(span)}, where {segment.owner} still lives")
            segment.owner, segment.write, segment.copied = span.buffer, (stream, sequence, label), copy
            segment.reads = {}

    def release(self, item: Release) -> None:
        for segment in self.covered(item.span):
            if segment.owner != item.span.buffer:
                raise ProgramError(f"{self.name}: {_at(item.span)} is released, but holds "
                                   f"{segment.owner or 'nothing: it was released before'}")
            if segment.copied:
                raise ProgramError(f"{self.name}: {item.span.buffer} is loaded and released without being read")
            segment.owner = None


def _at(span: Span) -> str:
    return f"{span.buffer} at {span.arena} [{span.offset}, {span.offset + span.nbytes})"


def _reads(item: Launch | Copy) -> tuple[Span, ...]:
    if isinstance(item, Launch):
        return item.reads
    if isinstance(item.src, FileRows):
        return (span_of(item.src.index),)
    return (item.src,) if isinstance(item.src, Span) else ()


def _writes(item: Launch | Copy) -> tuple[Span, ...]:
    if isinstance(item, Launch):
        return item.writes
    before, after = item.room
    dst = item.dst
    margins = (Span(dst.arena, dst.offset - before, before, dst.buffer),
               Span(dst.arena, dst.offset + dst.nbytes, after, dst.buffer))
    return (dst, *(span for span in margins if span.nbytes))


def _touched(item: Item) -> tuple[Span, ...]:
    if isinstance(item, Release):
        return (item.span,)
    if isinstance(item, Launch | Copy):
        return (*_reads(item), *_writes(item))
    return ()


def _difference(before: dict[str, list[str | None]], after: dict[str, list[str | None]]) -> str:
    for arena, owners in before.items():
        for a, b in zip(owners, after[arena], strict=True):
            if a != b:
                return f"{arena} held {a or 'nothing'}, now holds {b or 'nothing'}"
    return "nothing differs"
