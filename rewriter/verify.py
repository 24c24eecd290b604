"""Prove a `Program` safe before it runs, from the flat list alone.

The proof covers prologue and two steps, so it holds for any number of them (each step starts in the state that the
prologue leaves, and must leave it again; one that runs a single time need not). Happens-before is tracked with vector
clocks over streams and events. Reads from the disk complete out of order, so a copy on the disk stream is ordered
before another item only by a Record after it and a Wait on that Record.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

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
    record,
    span_of,
)


class ProgramError(RuntimeError):
    """A Program that could go wrong; the message names the item, the buffer and the two conflicting intervals."""


class _Segment:
    """One indivisible byte range: whose contents it holds, who wrote them, and the last read on each stream."""

    __slots__ = ("copied", "owner", "reads", "write_at", "write_stream")

    def __init__(self, streams: int) -> None:
        self.owner: str | None = None
        self.write_stream = self.write_at = 0  # position 0: never written
        self.copied = False  # last written by a Copy and not read since
        self.reads = [0] * streams  # position on each stream of the last read; a write orders what came before it


_Run = tuple[str, slice, list[str | None]]  # arena, indivisible ranges next to one another, the buffer meant for each


@record
class _Touched:
    """The memory of some spans: of that which launches on COMPUTE alone touch, where order is issue order, runs; of the
    rest its segments, and the buffer meant."""

    private: list[_Run]
    shared: list[tuple[list[_Segment], str]]


@record
class _Access:
    """An item's memory."""

    stream: int
    reads: _Touched
    writes: _Touched
    copied: bool  # by a Copy: what it brings must be read
    item: Launch | Copy


_Prepared = _Access | tuple[Release, _Touched] | Record | Wait


def verify_program(program: Program, budget: Mapping[str, int | None] | None = None) -> None:
    """Raise ProgramError unless every read follows the write it needs, no bytes are reused while someone may still
    touch them, all spans lie in their arenas, every load is read, every release is single, every wait has its record,
    the steady state repeats (unless the program runs once), and arenas plus workspace fit the budget (bytes per arena;
    None or absent: no limit)."""
    _check_sizes(program, budget or {})
    inputs = [Launch(COMPUTE, "", (), {}, (), (), (span_of(ref),), f"the caller's {name}")
              for name, ref in program.inputs.items()]  # between steps the caller writes them, on the compute stream
    state = _State(program, inputs)
    prologue, given, step = (state.prepared(items) for items in (program.prologue, inputs, program.step))
    state.run(prologue)
    before = state.owners()
    state.run(given)
    state.run(step)
    state.hand_over(program)
    if program.once:
        return
    state.compare(before)
    state.private = False  # a second step finds the rest owned as the first one did, and takes it in the same order
    state.run(_sharing(given))
    state.run(_sharing(step))
    state.hand_over(program)
    state.compare(before)


def _sharing(items: list[_Prepared]) -> list[_Prepared]:
    """Those that order others, or touch memory that not COMPUTE alone does."""
    return [item for item in items
            if (item.reads.shared or item.writes.shared if type(item) is _Access
                else type(item) is not tuple or item[1].shared)]


def _check_sizes(program: Program, budget: Mapping[str, int | None]) -> None:
    for arena, nbytes in program.arenas.items():
        limit = budget.get(arena)
        total = nbytes + (program.workspace_nbytes() if arena == "device" else 0)
        if limit is not None and total > limit:
            raise ProgramError(f"{program.name}: {arena} needs {total} bytes (arena {nbytes} and workspace "
                               f"{total - nbytes}), the budget is {limit}")


class _State:
    def __init__(self, program: Program, inputs: list[Launch]) -> None:
        self.name = program.name
        self._copies: dict[int, tuple[tuple[Span, ...], tuple[Span, ...]]] = {}  # reads and writes, by identity
        self._known: dict[int, _Touched] = {}  # by the identity of spans (items of equal layers share theirs)
        self._places: dict[int, tuple[int, int]] = {}  # by the identity of a span: its first range, the end of its last
        self.private = True  # what COMPUTE alone touches is looked at too
        streams = {COMPUTE: None}
        groups: dict[int, tuple[Span, ...]] = {}
        shared: list[tuple[Span, ...]] = []  # touched by a Copy, or by another stream than COMPUTE
        for item in itertools.chain(program.prologue, inputs, program.step):
            if type(item) is Launch:
                groups[id(item.reads)], groups[id(item.writes)] = item.reads, item.writes
                if item.stream != COMPUTE:
                    shared += (item.reads, item.writes)
            elif type(item) is Copy:
                spans = self._copies[id(item)] = _reads(item), _writes(item)
                groups[id(spans[0])], groups[id(spans[1])] = spans
                shared += spans
            elif type(item) is Release and id(item) not in groups:
                groups[id(item)] = (item.span,)
                if item.stream != COMPUTE:
                    shared.append((item.span,))
            streams[item.stream] = None
        self.results = [span_of(ref) for ref in program.outputs.values()]
        self.streams = list(streams)
        self.number = {stream: i for i, stream in enumerate(self.streams)}
        self.ordered = [stream not in UNORDERED for stream in self.streams]
        self.items: list[list[Launch | Copy | None]] = [[None] for _ in self.streams]  # by position on the stream
        self.clocks = [[0] * len(self.streams) for _ in self.streams]
        self.events: dict[int, list[int]] = {}
        self._cut((tuple(program.resident.values()), tuple(self.results), *groups.values()), shared, program.arenas)
        for span in program.resident.values():
            touched = self._looked_up((span,))
            owners = [s.owner for segments, _ in touched.shared for s in segments]
            owners += [owner for arena, where, _ in touched.private for owner in self.held[arena][where]]
            other = next((owner for owner in owners if owner not in (None, span.buffer)), None)
            if other is not None:
                raise ProgramError(f"{self.name}: {span.buffer} and {other} are both kept at "
                                   f"{span.arena} [{span.offset}, {span.offset + span.nbytes})")
            self._fill(touched, span.buffer)

    def _cut(self, groups: Iterable[tuple[Span, ...]], shared: Iterable[tuple[Span, ...]], arenas: Mapping[str, int]
             ) -> None:
        """Cut every arena where any span begins or ends; what the `shared` ones cover becomes segments."""
        cuts: dict[str, set[int]] = {arena: {0, nbytes} for arena, nbytes in arenas.items()}
        spans = {id(span): span for group in groups for span in group}
        for span in spans.values():
            points = cuts.get(span.arena)
            if points is None:
                raise ProgramError(f"{self.name}: {span.buffer} lies in the unknown arena {span.arena!r}")
            offset, end = span.offset, span.offset + span.nbytes
            if offset < 0 or end > arenas[span.arena]:
                raise ProgramError(f"{self.name}: {span.buffer} [{offset}, {end}) "
                                   f"leaves the arena {span.arena} of {arenas[span.arena]} bytes")
            points.add(offset)
            points.add(end)
        self.cuts = {arena: sorted(points) for arena, points in cuts.items()}
        index = {arena: {point: i for i, point in enumerate(points)} for arena, points in self.cuts.items()}
        for key, span in spans.items():
            at = index[span.arena]
            self._places[key] = at[span.offset], at[span.offset + span.nbytes]
        self.held: dict[str, list[str | None]] = {arena: [None] * len(points) for arena, points in self.cuts.items()}
        self.segments: dict[str, list[_Segment | None]] = {
            arena: [None] * len(points) for arena, points in self.cuts.items()}
        for group in shared:
            for span in group:
                segments = self.segments[span.arena]
                for i in range(*self._places[id(span)]):
                    if segments[i] is None:
                        segments[i] = _Segment(len(self.streams))

    def prepared(self, items: Iterable[Item]) -> list[_Prepared]:
        """The items with their memory looked up, once for those that share their spans."""
        found: list[_Prepared] = []
        number, known, spans = self.number, self._known, self._spans
        for item in items:
            kind = type(item)
            if kind is Record or kind is Wait:
                found.append(item)  # type: ignore[arg-type]
            elif kind is Release:
                freed = known.get(id(item))
                if freed is None:
                    freed = known[id(item)] = self._looked_up((item.span,))  # type: ignore[union-attr]
                found.append((item, freed))  # type: ignore[arg-type]
            else:
                reads, writes = spans(item)  # type: ignore[arg-type]
                read, written = known.get(id(reads)), known.get(id(writes))
                if read is None:
                    read = known[id(reads)] = self._looked_up(reads)
                if written is None:
                    written = known[id(writes)] = self._looked_up(writes)
                found.append(_Access(number[item.stream], read, written, kind is Copy, item))  # type: ignore[arg-type]
        return found

    def _spans(self, item: Launch | Copy) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        """What an item reads and writes."""
        return (item.reads, item.writes) if isinstance(item, Launch) else self._copies[id(item)]

    def _looked_up(self, spans: tuple[Span, ...]) -> _Touched:
        private: list[_Run] = []
        shared: list[tuple[list[_Segment], str]] = []
        for span in spans:
            lower, upper = self._places[id(span)]
            segments = self.segments[span.arena][lower:upper]
            if segments.count(None) == upper - lower:
                private.append((span.arena, slice(lower, upper), [span.buffer] * (upper - lower)))
                continue
            shared.append(([s for s in segments if s is not None], span.buffer))
            private += [(span.arena, slice(lower + i, lower + i + 1), [span.buffer])
                        for i, s in enumerate(segments) if s is None]
        return _Touched(private, shared)

    def _fill(self, touched: _Touched, owner: str | None) -> None:
        for arena, where, meant in touched.private:
            self.held[arena][where] = [owner] * len(meant)
        for segments, _ in touched.shared:
            for segment in segments:
                segment.owner = owner

    def compare(self, before: dict[str, list[str | None]]) -> None:
        """Raise ProgramError unless memory is owned as it was before the step."""
        after = self.owners()
        if after != before:
            raise ProgramError(f"{self.name}: a step does not leave the memory as the next step expects it: "
                               f"{_difference(before, after)}")

    def owners(self) -> dict[str, list[str | None]]:
        """Whose contents every range of every arena holds."""
        return {arena: [kept if s is None else s.owner for s, kept in zip(segments, self.held[arena], strict=True)]
                for arena, segments in self.segments.items()}

    def hand_over(self, program: Program) -> None:
        """Between steps the caller takes the outputs; their memory is free in the next step."""
        for span in self.results:
            touched = self._looked_up((span,))
            owners = [s.owner for segments, _ in touched.shared for s in segments]
            if self.private:
                owners += [owner for arena, where, _ in touched.private for owner in self.held[arena][where]]
            other = [owner for owner in owners if owner != span.buffer]
            if other:
                raise ProgramError(f"{self.name}: the output {span.buffer} is overwritten by {other[0]}")
        taken = {span.buffer for span in self.results} - set(program.resident)
        for arena, kept in self.held.items():
            self.held[arena][:] = [None if owner in taken else owner for owner in kept]
            for segment in self.segments[arena]:
                if segment is not None and segment.owner in taken:
                    segment.owner = None

    def run(self, items: list[_Prepared]) -> None:
        clocks, events, number, positions, held = self.clocks, self.events, self.number, self.items, self.held
        private = self.private
        for item in items:
            if type(item) is _Access:
                access, stream = item, item.stream
                clock, issued = clocks[stream], positions[stream]
                at = len(issued)
                issued.append(access.item)
                if self.ordered[stream]:
                    clock[stream] = at  # nothing on an ordered stream overtakes, so an item may write what it reads
                reads, writes = access.reads, access.writes
                for arena, where, meant in reads.private if private else ():
                    if held[arena][where] != meant:
                        self._refuse_private(access, arena, where, meant, "reads")
                for segments, buffer in reads.shared:
                    for segment in segments:
                        if segment.owner != buffer or segment.write_at > clock[segment.write_stream]:
                            self._refuse_read(segment, buffer, stream, access)
                        segment.reads[stream] = at
                        segment.copied = False
                for arena, where, meant in writes.private if private else ():
                    owners = held[arena]
                    if owners[where] != meant:
                        for owner in owners[where]:
                            if owner is not None and owner != meant[0]:
                                self._refuse_private(access, arena, where, meant, "writes")
                        owners[where] = meant
                copied = access.copied
                for segments, buffer in writes.shared:
                    for segment in segments:
                        if ((segment.owner is not None and (segment.copied or segment.owner != buffer))
                                or segment.write_at > clock[segment.write_stream]):
                            self._refuse_write(segment, buffer, stream, access)
                        for read, seen in zip(segment.reads, clock, strict=True):
                            if read > seen:
                                self._refuse_write(segment, buffer, stream, access)
                        segment.owner, segment.write_stream, segment.write_at = buffer, stream, at
                        segment.copied = copied
                    copied = False  # the other spans of a Copy are margins
            elif type(item) is tuple:
                release, touched = item
                for arena, where, meant in touched.private if private else ():
                    if held[arena][where] != meant:
                        self._refuse_release(next(o for o in held[arena][where] if o != meant[0]), release.span)
                    held[arena][where] = [None] * len(meant)
                for segments, buffer in touched.shared:
                    for segment in segments:
                        if segment.owner != buffer or segment.copied:
                            self._refuse_release(segment.owner, release.span)
                        segment.owner = None
            elif type(item) is Record:
                stream = number[item.stream]
                clock = events[item.event] = clocks[stream].copy()
                clock[stream] = len(positions[stream]) - 1
            elif type(item) is Wait:
                recorded = events.get(item.event)
                if recorded is None:
                    raise ProgramError(f"{self.name}: {item.stream} waits for event {item.event}, "
                                       "which nothing recorded before")
                clock = clocks[number[item.stream]]
                for i, count in enumerate(recorded):
                    if clock[i] < count:
                        clock[i] = count

    def _refuse_private(self, access: _Access, arena: str, where: slice, meant: list[str | None], what: str) -> None:
        owners, buffer, item = self.held[arena][where], meant[0], access.item
        i = next(i for i, owner in enumerate(owners) if owner != buffer and (what == "reads" or owner is not None))
        point = self.cuts[arena][where.start + i]
        span = next(_at(s) for s in self._spans(item)[what == "writes"]
                    if s.buffer == buffer and s.arena == arena and s.offset <= point < s.offset + s.nbytes)
        if what == "reads":
            raise ProgramError(f"{self.name}: {item.label} reads {span}, which holds {owners[i] or 'nothing'} by then")
        raise ProgramError(f"{self.name}: {item.label} writes {span}, where {owners[i]} still lives")

    def _refuse_read(self, segment: _Segment, buffer: str, stream: int, access: _Access) -> None:
        label, span = access.item.label, self._span_at(segment, buffer, self._spans(access.item)[0])
        if segment.owner != buffer:
            raise ProgramError(f"{self.name}: {label} reads {span}, which holds {segment.owner or 'nothing'} by then")
        raise ProgramError(f"{self.name}: {label} on {self.streams[stream]} reads {span} without waiting for "
                           f"{self._writer(segment)}")

    def _refuse_write(self, segment: _Segment, buffer: str, stream: int, access: _Access) -> None:
        clock, here, label = self.clocks[stream], self.streams[stream], access.item.label
        span = self._span_at(segment, buffer, self._spans(access.item)[1])
        if segment.copied and segment.owner is not None:
            raise ProgramError(f"{self.name}: {label} overwrites {segment.owner}, loaded and never read")
        for other, read in enumerate(segment.reads):
            if read > clock[other]:
                raise ProgramError(f"{self.name}: {label} on {here} overwrites {span} while "
                                   f"{self._label(other, read)} on {self.streams[other]} may still read "
                                   f"{segment.owner} there")
        if segment.write_at > clock[segment.write_stream]:
            raise ProgramError(f"{self.name}: {label} on {here} overwrites {span} while {self._writer(segment)} may "
                               "still write there")
        raise ProgramError(f"{self.name}: {label} writes {span}, where {segment.owner} still lives")

    def _writer(self, segment: _Segment) -> str:
        return f"{self._label(segment.write_stream, segment.write_at)} on {self.streams[segment.write_stream]}"

    def _label(self, stream: int, position: int) -> str:
        item = self.items[stream][position]
        return "" if item is None else item.label

    def _span_at(self, segment: _Segment, buffer: str, spans: tuple[Span, ...]) -> str:
        """The one of an item's spans that covers the segment, as text."""
        return next((_at(s) for s in spans if s.buffer == buffer
                     and segment in self.segments[s.arena][slice(*self._places[id(s)])]), buffer)

    def _refuse_release(self, owner: str | None, span: Span) -> None:
        if owner != span.buffer:
            raise ProgramError(f"{self.name}: {_at(span)} is released, but holds "
                               f"{owner or 'nothing: it was released before'}")
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


def _difference(before: dict[str, list[str | None]], after: dict[str, list[str | None]]) -> str:
    for arena, owners in before.items():
        for a, b in zip(owners, after[arena], strict=True):
            if a != b:
                return f"{arena} held {a or 'nothing'}, now holds {b or 'nothing'}"
    return "nothing differs"
