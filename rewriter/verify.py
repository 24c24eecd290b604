"""Prove a `Program` safe before it runs, from the flat list alone.

The proof covers prologue and two steps, so it holds for any number of them (each step starts in the state that the
prologue leaves, and must leave it again; one that runs a single time need not). Happens-before is tracked with vector
clocks over streams and events. Reads from the disk complete out of order, so a copy on the disk stream is ordered
before another item only by a Record after it and a Wait on that Record.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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


class _Segment:
    """One indivisible byte range: whose contents it holds, who wrote them, and the last read on each stream."""

    __slots__ = ("copied", "owner", "reads", "shared", "write_at", "write_stream")

    def __init__(self, streams: int) -> None:
        self.owner: str | None = None
        self.write_stream = self.write_at = 0  # position 0: never written
        self.copied = False  # last written by a Copy and not read since
        self.reads = [0] * streams  # position on each stream of the last read; a write orders what came before it
        self.shared = False  # touched by another stream than COMPUTE


@dataclass(frozen=True, slots=True)
class _Access:
    """An item's memory, cut into segments: for each of its spans these, and the buffer whose contents are meant."""

    stream: int
    reads: list[tuple[list[_Segment], str]]
    writes: list[tuple[list[_Segment], str]]
    copied: bool  # by a Copy: what it brings must be read
    item: Launch | Copy


_Prepared = _Access | tuple[Release, list[_Segment]] | Record | Wait


def verify_program(program: Program, budget: Mapping[str, int | None] | None = None) -> None:
    """Raise ProgramError unless every read follows the write it needs, no bytes are reused while someone may still
    touch them, all spans lie in their arenas, every load is read, every release is single, every wait has its record,
    the steady state repeats (unless the program runs once), and arenas plus workspace fit the budget (bytes per arena;
    None or absent: no limit)."""
    _check_sizes(program, budget or {})
    state = _State(program)
    prologue, step = state.prepared(program.prologue), state.prepared(program.step)
    state.run(prologue)
    before = state.owners()
    state.take_inputs(program)
    state.run(step)
    state.hand_over(program)
    if program.once:
        return
    state.compare(before)
    again = state.repeated(step)
    state.take_inputs(program)
    state.run(again)
    state.hand_over(program, shared=True)
    state.compare(before)


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
        self.streams = list(dict.fromkeys((COMPUTE, *program.streams())))
        self.number = {stream: i for i, stream in enumerate(self.streams)}
        self.ordered = [stream not in UNORDERED for stream in self.streams]
        self.labels: list[list[str]] = [[""] for _ in self.streams]  # by position on the stream
        self.clocks = [[0] * len(self.streams) for _ in self.streams]
        self.events: dict[int, list[int]] = {}
        self._cut(program)
        for span in program.resident.values():
            for segment in self.covered(span):
                if segment.owner not in (None, span.buffer):
                    raise ProgramError(f"{self.name}: {span.buffer} and {segment.owner} are both kept at "
                                       f"{span.arena} [{span.offset}, {span.offset + span.nbytes})")
                segment.owner = span.buffer

    def _cut(self, program: Program) -> None:
        """Cut every arena where any span begins or ends."""
        cuts: dict[str, set[int]] = {arena: {0, nbytes} for arena, nbytes in program.arenas.items()}
        groups: dict[int, tuple[Span, ...]] = {}  # items of equal layers share their spans: each is looked at once
        for item in (*program.prologue, *program.step):
            for group in _touched(item):
                groups[id(group)] = group
        kept, results = program.resident.values(), [span_of(ref) for ref in program.outputs.values()]
        for spans in (kept, results, *groups.values()):
            for span in spans:
                points = cuts.get(span.arena)
                if points is None:
                    raise ProgramError(f"{self.name}: {span.buffer} lies in the unknown arena {span.arena!r}")
                offset, end = span.offset, span.offset + span.nbytes
                if offset < 0 or end > program.arenas[span.arena]:
                    raise ProgramError(f"{self.name}: {span.buffer} [{offset}, {end}) "
                                       f"leaves the arena {span.arena} of {program.arenas[span.arena]} bytes")
                points.add(offset)
                points.add(end)
        self.cuts = {arena: sorted(points) for arena, points in cuts.items()}
        count = len(self.streams)
        self.segments = {arena: [_Segment(count) for _ in points] for arena, points in self.cuts.items()}
        self.index = {arena: {point: i for i, point in enumerate(points)} for arena, points in self.cuts.items()}

    def covered(self, span: Span) -> list[_Segment]:
        at = self.index[span.arena]
        lower, upper = at.get(span.offset), at.get(span.offset + span.nbytes)
        if lower is None or upper is None:  # an input's or output's span, which cut nothing
            points = self.cuts[span.arena]
            lower, upper = bisect_left(points, span.offset), bisect_left(points, span.offset + span.nbytes)
        return self.segments[span.arena][lower:upper]

    def prepared(self, items: Iterable[Item]) -> list[_Prepared]:
        """The items with their memory looked up; items that share their spans share what was found."""
        known: dict[int, list[tuple[list[_Segment], str]]] = {}
        releases: dict[int, tuple[Release, list[_Segment]]] = {}
        found: list[_Prepared] = []
        number, touched = self.number, self._touched
        for item in items:
            if isinstance(item, Launch):
                reads, writes = known.get(id(item.reads)), known.get(id(item.writes))
                if reads is None:
                    reads = known[id(item.reads)] = touched(item.reads)
                if writes is None:
                    writes = known[id(item.writes)] = touched(item.writes)
                found.append(_Access(number[item.stream], reads, writes, False, item))
            elif isinstance(item, Copy):
                found.append(_Access(number[item.stream], touched(_reads(item)), touched(_writes(item)), True, item))
            elif isinstance(item, Release):
                freed = releases.get(id(item))
                if freed is None:
                    freed = releases[id(item)] = (item, self.covered(item.span))
                found.append(freed)
            else:
                found.append(item)
        return found

    def _touched(self, spans: tuple[Span, ...]) -> list[tuple[list[_Segment], str]]:
        return [(self.covered(span), span.buffer) for span in spans]

    def repeated(self, items: list[_Prepared]) -> list[_Prepared]:
        """What of a step must be looked at a second time: the memory that another stream than COMPUTE touches. The rest
        a second step finds owned as the first one did, and takes in the same order, so it can only do the same."""
        for item in items:
            if isinstance(item, _Access) and item.stream:
                for segments, _ in (*item.reads, *item.writes):
                    for segment in segments:
                        segment.shared = True
            elif isinstance(item, tuple) and self.number[item[0].stream]:
                for segment in item[1]:
                    segment.shared = True
        known: dict[int, list[tuple[list[_Segment], str]]] = {}

        def shared(touched: list[tuple[list[_Segment], str]]) -> list[tuple[list[_Segment], str]]:
            found = known.get(id(touched))
            if found is None:
                found = known[id(touched)] = [
                    (left, buffer) for segments, buffer in touched if (left := [s for s in segments if s.shared])]
            return found

        again: list[_Prepared] = []
        for item in items:
            if isinstance(item, _Access):
                reads, writes = shared(item.reads), shared(item.writes)
                if reads or writes:
                    again.append(_Access(item.stream, reads, writes, item.copied, item.item))
            elif isinstance(item, tuple):
                left = [s for s in item[1] if s.shared]
                if left:
                    again.append((item[0], left))
            else:
                again.append(item)
        return again

    def compare(self, before: dict[str, list[str | None]]) -> None:
        """Raise ProgramError unless memory is owned as it was before the step."""
        after = self.owners()
        if after != before:
            raise ProgramError(f"{self.name}: a step does not leave the memory as the next step expects it: "
                               f"{_difference(before, after)}")

    def owners(self) -> dict[str, list[str | None]]:
        return {arena: [s.owner for s in segments] for arena, segments in self.segments.items()}

    def take_inputs(self, program: Program) -> None:
        """Between steps the caller writes the inputs, on the compute stream."""
        stream = self.number[COMPUTE]
        for name, ref in program.inputs.items():
            span = span_of(ref)
            label = f"the caller's {name}"
            at = len(self.labels[stream])
            self.labels[stream].append(label)
            for segment in self.covered(span):
                if segment.owner not in (None, span.buffer) or segment.copied or any(
                        read > seen for read, seen in zip(segment.reads, self.clocks[stream], strict=True)):
                    self._refuse_write(segment, _at(span), stream, label)
                segment.owner, segment.write_stream, segment.write_at, segment.copied = span.buffer, stream, at, False
            self.clocks[stream][stream] = at

    def hand_over(self, program: Program, shared: bool = False) -> None:
        """Between steps the caller takes the outputs (with `shared`, looks only at what `repeated` does); their memory
        is free in the next step."""
        for ref in program.outputs.values():
            for segment in self.covered(span_of(ref)):
                if segment.owner != ref.buffer and (segment.shared or not shared):
                    raise ProgramError(f"{self.name}: the output {ref.buffer} is overwritten by {segment.owner}")
        taken = {ref.buffer for ref in program.outputs.values()} - set(program.resident)
        for segments in self.segments.values():
            for segment in segments:
                if segment.owner in taken:
                    segment.owner = None

    def run(self, items: list[_Prepared]) -> None:
        clocks, events, number, labels = self.clocks, self.events, self.number, self.labels
        for item in items:
            if isinstance(item, _Access):
                access, stream = item, item.stream
                clock, names = clocks[stream], labels[stream]
                at = len(names)
                names.append(access.item.label)
                if self.ordered[stream]:
                    clock[stream] = at  # nothing on an ordered stream overtakes, so an item may write what it reads
                for segments, buffer in access.reads:
                    for segment in segments:
                        if segment.owner != buffer or segment.write_at > clock[segment.write_stream]:
                            self._refuse_read(segment, buffer, stream, access)
                        segment.reads[stream] = at
                        segment.copied = False
                copied = access.copied
                for segments, buffer in access.writes:
                    for segment in segments:
                        if ((segment.owner is not None and (segment.copied or segment.owner != buffer))
                                or segment.write_at > clock[segment.write_stream]):
                            self._refuse_write(segment, buffer, stream, access.item.label, access)
                        for read, seen in zip(segment.reads, clock, strict=True):
                            if read > seen:
                                self._refuse_write(segment, buffer, stream, access.item.label, access)
                        segment.owner, segment.write_stream, segment.write_at = buffer, stream, at
                        segment.copied = copied
                    copied = False  # the other spans of a Copy are margins
            elif isinstance(item, tuple):
                release, segments = item
                buffer = release.span.buffer
                for segment in segments:
                    if segment.owner != buffer or segment.copied:
                        self._refuse_release(segment, release.span)
                    segment.owner = None
            elif isinstance(item, Record):
                stream = number[item.stream]
                clock = events[item.event] = clocks[stream].copy()
                clock[stream] = len(labels[stream]) - 1
            else:
                recorded = events.get(item.event)
                if recorded is None:
                    raise ProgramError(f"{self.name}: {item.stream} waits for event {item.event}, "
                                       "which nothing recorded before")
                clock = clocks[number[item.stream]]
                for i, count in enumerate(recorded):
                    if clock[i] < count:
                        clock[i] = count

    def _refuse_read(self, segment: _Segment, buffer: str, stream: int, access: _Access) -> None:
        label, span = access.item.label, self._span_at(segment, buffer, _reads(access.item))
        if segment.owner != buffer:
            raise ProgramError(f"{self.name}: {label} reads {span}, which holds {segment.owner or 'nothing'} by then")
        raise ProgramError(f"{self.name}: {label} on {self.streams[stream]} reads {span} without waiting for "
                           f"{self._writer(segment)}")

    def _refuse_write(
        self, segment: _Segment, buffer: str, stream: int, label: str, access: _Access | None = None
    ) -> None:
        clock, here = self.clocks[stream], self.streams[stream]
        span = buffer if access is None else self._span_at(segment, buffer, _writes(access.item))
        if segment.copied and segment.owner is not None:
            raise ProgramError(f"{self.name}: {label} overwrites {segment.owner}, loaded and never read")
        for other, read in enumerate(segment.reads):
            if read > clock[other]:
                raise ProgramError(f"{self.name}: {label} on {here} overwrites {span} while "
                                   f"{self.labels[other][read]} on {self.streams[other]} may still read "
                                   f"{segment.owner} there")
        if segment.write_at > clock[segment.write_stream]:
            raise ProgramError(f"{self.name}: {label} on {here} overwrites {span} while {self._writer(segment)} may "
                               "still write there")
        raise ProgramError(f"{self.name}: {label} writes {span}, where {segment.owner} still lives")

    def _writer(self, segment: _Segment) -> str:
        return f"{self.labels[segment.write_stream][segment.write_at]} on {self.streams[segment.write_stream]}"

    def _span_at(self, segment: _Segment, buffer: str, spans: tuple[Span, ...]) -> str:
        """The one of an item's spans that covers the segment, as text."""
        return next((_at(s) for s in spans if s.buffer == buffer and segment in self.covered(s)), buffer)

    def _refuse_release(self, segment: _Segment, span: Span) -> None:
        if segment.owner != span.buffer:
            raise ProgramError(f"{self.name}: {_at(span)} is released, but holds "
                               f"{segment.owner or 'nothing: it was released before'}")
        raise ProgramError(f"{self.name}: {span.buffer} is loaded and released without being read")


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


def _touched(item: Item) -> tuple[tuple[Span, ...], ...]:
    if isinstance(item, Launch):
        return item.reads, item.writes
    if isinstance(item, Copy):
        return _reads(item), _writes(item)
    return ((item.span,),) if isinstance(item, Release) else ()


def _difference(before: dict[str, list[str | None]], after: dict[str, list[str | None]]) -> str:
    for arena, owners in before.items():
        for a, b in zip(owners, after[arena], strict=True):
            if a != b:
                return f"{arena} held {a or 'nothing'}, now holds {b or 'nothing'}"
    return "nothing differs"
