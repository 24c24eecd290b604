"""Prove a `Program` safe before it runs, from the flat list alone.

The proof covers prologue and two steps, so it holds for any number of them (each step starts in the state that the
prologue leaves, and must leave it again; one that runs a single time need not). Happens-before is tracked with vector
clocks over streams and events. Copies from and to the disk complete out of order, so a copy on such a stream is ordered
before another item only by a Record after it and a Wait on that Record. A byte range of a spill file is memory like any
other: its contents have a name, and who reads them must have waited for who wrote them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from forebay.rewriter.ir.printable import PrintableError
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
    Wait,
    span_of,
)
from forebay.rewriter.verify.held import (
    PreparedItem,
    Range,
    Segment,
    Touched,
    TouchedRun,
    apart,
    buffer_of,
    difference,
    owners_of,
)
from forebay.rewriter.verify.items import ItemFault, check_items, check_sizes, copy_spans, span_text, writes_in_part

OUTWARD = (DOWNLOAD, WRITE)


class ProgramError(PrintableError, RuntimeError):
    """A Program that could go wrong; the message names the item, the buffer and the two conflicting intervals."""


def verify_program(program: Program, budget: Mapping[str, int | None] | None = None) -> None:
    """Raise ProgramError unless every copy fills its target, launches declare all they touch, every read follows the
    write it needs, no bytes are reused while someone may still touch them, all spans lie in their arenas and spill
    files, every load is read (and every store, unless it updates what is kept), every release is single, every wait has
    its record, the steady state repeats (unless the program runs once), and arenas plus workspace and spill files fit
    the budget (bytes per arena, and of `disk`; None or absent: no limit)."""
    try:
        check_sizes(program, budget or {})
        check_items(program)
    except ItemFault as fault:
        raise ProgramError(f"{program.name}: {fault}") from None
    state = _ProofState(program)
    state.run(state.prologue)
    before = state.owners()
    state.run(state.given)
    state.run(state.step)
    state.hand_over(program)
    if program.once:
        return
    state.compare(before)
    state.private = False  # a second step finds the rest owned as the first one did, and takes it in the same order
    state.run(_sharing(state.given))
    state.run(_sharing(state.step))
    state.hand_over(program)
    state.compare(before)


def _sharing(items: list[PreparedItem]) -> list[PreparedItem]:
    """Return the items that order others, or touch memory that copies also touch."""
    return [entry for entry in items if entry[2].shared or entry[3].shared or type(entry[0]) in (Record, Wait)]


class _ProofState:
    def __init__(self, program: Program) -> None:
        self.name = program.name
        self.private = True  # what launches alone touch is looked at too
        self._known: dict[int, Touched] = {}  # by the identity of spans (items of equal layers share theirs)
        self._touched: list[Touched] = []
        self._copied: list[Span] = []  # touched by a Copy, or by another stream than COMPUTE
        self._nothing = Touched(())
        self.kept = {span.buffer for span in program.resident.values()}
        self.number = {COMPUTE: 0}
        given = [Launch(COMPUTE, "", (), {}, (), (), (span_of(ref),), f"the caller's {name}")
                 for name, ref in program.inputs.items()]  # between steps the caller writes them, on the compute stream
        taken = [Launch(COMPUTE, "", (), {}, (), (span_of(ref),), (), f"the caller, who takes {name},")
                 for name, ref in program.outputs.items()]
        self.prologue, self.given, self.step, self.taken = (
            self._prepared(i) for i in (program.prologue, given, program.step, taken))
        kept = [self._new((span,)) for span in program.resident.values()]
        self.results = [self._new((span_of(ref),)) for ref in program.outputs.values()]
        self._cut({**program.arenas, **program.files})
        self.streams = list(self.number)
        self.ordered = [stream not in UNORDERED for stream in self.streams]
        self.items: list[list[Launch | Copy | None]] = [[None] for _ in self.streams]  # by position on the stream
        self.clocks = [[0] * len(self.streams) for _ in self.streams]
        self.events: dict[int, list[int]] = {}
        for touched in kept:
            span = touched.spans[0]
            other = next((owner for owner in self._owners(touched) if owner not in (None, span.buffer)), None)
            if other is not None:
                raise ProgramError(f"{self.name}: {span.buffer} and {other} are both kept at "
                                   f"{span.arena} [{span.offset}, {span.offset + span.nbytes})")
            for owners, where, meant in touched.private:
                owners[where] = meant
            for segments, _ in touched.shared:
                for segment in segments:
                    segment.owner = span.buffer

    def _prepared(self, items: Iterable[Item]) -> list[PreparedItem]:
        """The items with their memory, which is looked up once for those that share their spans."""
        found: list[PreparedItem] = []
        number, known, nothing, new, copied = self.number, self._known, self._nothing, self._new, self._copied
        for item in items:
            stream = number.get(item.stream)
            if stream is None:
                stream = number[item.stream] = len(number)
            kind = type(item)
            if kind is Launch:
                reads, writes = known.get(id(item.reads)), known.get(id(item.writes))  # type: ignore[union-attr]
                if reads is None:
                    reads = known[id(item.reads)] = new(item.reads)  # type: ignore[union-attr]
                if writes is None:
                    writes = known[id(item.writes)] = new(item.writes)  # type: ignore[union-attr]
                if stream:  # not COMPUTE
                    copied += (*reads.spans, *writes.spans)
                found.append((item, stream, reads, writes))
            elif kind is Copy:
                reads, writes = map(new, copy_spans(item))  # type: ignore[arg-type]
                copied += reads.spans
                copied += writes.spans
                found.append((item, stream, reads, writes))
            elif kind is Release:
                freed = known.get(id(item))
                if freed is None:
                    freed = known[id(item)] = new((item.span,))  # type: ignore[union-attr]
                    if item.stream != COMPUTE:
                        copied += freed.spans
                found.append((item, stream, freed, nothing))
            else:
                found.append((item, stream, nothing, nothing))
        return found

    def _new(self, spans: tuple[Span, ...]) -> Touched:
        touched = Touched(spans)
        self._touched.append(touched)
        return touched

    def _cut(self, arenas: Mapping[str, int]) -> None:
        """Cut every arena and file where any span begins or ends, and look all spans up; what copies touch becomes
        segments."""
        cuts: dict[str, set[int]] = {arena: {0, nbytes} for arena, nbytes in arenas.items()}
        spans = {(s.arena, s.offset, s.nbytes): s for touched in self._touched for s in touched.spans}
        for (arena, offset, nbytes), span in spans.items():
            points = cuts.get(arena)
            if points is None:
                raise ProgramError(f"{self.name}: {span.buffer} lies in the unknown arena {arena!r}")
            if not 0 <= offset <= offset + nbytes <= arenas[arena]:
                raise ProgramError(f"{self.name}: {span.buffer} [{offset}, {offset + nbytes}) "
                                   f"leaves the arena {arena} of {arenas[arena]} bytes")
            points.add(offset)
            points.add(offset + nbytes)
        self.cuts = {arena: sorted(points) for arena, points in cuts.items()}
        self.held: dict[str, list[str | None]] = {arena: [None] * len(points) for arena, points in self.cuts.items()}
        self.segments: dict[str, list[Segment | None]] = {
            arena: [None] * len(points) for arena, points in self.cuts.items()}
        index = {arena: {point: i for i, point in enumerate(points)} for arena, points in self.cuts.items()}
        for arena, offset, nbytes in {(s.arena, s.offset, s.nbytes) for s in self._copied}:
            segments = self.segments[arena]
            for i in range(index[arena][offset], index[arena][offset + nbytes]):
                segments[i] = segments[i] or Segment()
        self._ranges: dict[tuple[str, int, int], Range] = {}
        for arena, offset, nbytes in spans:
            lower, upper = index[arena][offset], index[arena][offset + nbytes]
            among = [s for s in self.segments[arena][lower:upper] if s is not None]
            self._ranges[arena, offset, nbytes] = lower, upper, among
        for touched in self._touched:
            self._look_up(touched)

    def _look_up(self, touched: Touched) -> None:
        for span in touched.spans:
            lower, upper, segments = self._ranges[span.arena, span.offset, span.nbytes]
            owners = self.held[span.arena]
            if segments:
                touched.shared.append((segments, span.buffer))
                if len(segments) < upper - lower:
                    cut = self.segments[span.arena]
                    touched.private += [(owners, i, span.buffer) for i in range(lower, upper) if cut[i] is None]
            elif upper - lower == 1:
                touched.private.append((owners, lower, span.buffer))
            elif upper > lower:
                touched.private.append((owners, slice(lower, upper), [span.buffer] * (upper - lower)))

    def _owners(self, touched: Touched) -> list[str | None]:
        """Whose contents the memory holds, as far as it is looked at."""
        found = [segment.owner for segments, _ in touched.shared for segment in segments]
        if self.private:
            found += [owner for run in touched.private for owner in owners_of(run)]
        return found

    def compare(self, before: dict[str, list[str | None]]) -> None:
        """Raise ProgramError unless memory is owned as it was before the step."""
        after = self.owners()
        if after != before:
            raise ProgramError(f"{self.name}: a step does not leave the memory as the next step expects it: "
                               f"{difference(before, after)}")

    def owners(self) -> dict[str, list[str | None]]:
        """Whose contents every range of every arena holds."""
        return {arena: [kept if s is None else s.owner for s, kept in zip(segments, self.held[arena], strict=True)]
                for arena, segments in self.segments.items()}

    def hand_over(self, program: Program) -> None:
        """Between steps the caller takes the outputs; their memory is free in the next step."""
        taken = set()
        for touched in self.results:
            buffer = touched.spans[0].buffer
            other = [owner for owner in self._owners(touched) if owner != buffer]
            if other:
                raise ProgramError(f"{self.name}: the output {buffer} is overwritten by {other[0]}")
            if buffer not in program.resident:
                taken.add(buffer)
        self.run(self.taken)  # a read like any other: behind the last write, and nothing may overwrite it unordered
        for arena, kept in self.held.items():
            kept[:] = [None if owner in taken else owner for owner in kept]
            for segment in self.segments[arena]:
                if segment is not None and segment.owner in taken:
                    segment.owner = None

    def run(self, items: list[PreparedItem]) -> None:
        clocks, events, positions, private = self.clocks, self.events, self.items, self.private
        for item, stream, reads, writes in items:
            kind = type(item)
            if kind is Launch or kind is Copy:
                clock, issued = clocks[stream], positions[stream]
                at = len(issued)
                issued.append(item)  # type: ignore[arg-type]
                if self.ordered[stream]:
                    clock[stream] = at  # nothing on an ordered stream overtakes, so an item may write what it reads
                for run in reads.private if private else ():
                    owners, where, meant = run
                    if owners[where] != meant:
                        self._refuse_private(item, reads, run, "reads")
                for segments, buffer in reads.shared:
                    for segment in segments:
                        if segment.owner != buffer or (
                                (segment.beside or segment.write_at > clock[segment.write_stream])
                                and not apart(item, self.items, segment.under_way(clock), False)):
                            self._refuse_read(segment, buffer, stream, item, reads)
                        segment.reads[stream] = at
                        segment.copied = False
                for run in writes.private if private else ():
                    owners, where, meant = run
                    found = owners[where]
                    if found != meant:
                        if found is not None:
                            self._check_free(item, writes, run)
                        owners[where] = meant
                copied = kind is Copy  # what it brings must be read; what it takes out may update what is kept
                if copied and (type(item.src) is Rows or type(item.dst) is Rows or item.stream in OUTWARD):  # type: ignore[union-attr]
                    copied = self._check_outward(item, writes)  # type: ignore[arg-type]
                for segments, buffer in writes.shared:
                    for segment in segments:
                        beside = segment.beside or segment.write_at > clock[segment.write_stream]
                        segment.beside = segment.under_way(clock) if beside else ()
                        if segment.owner not in (None, buffer) or (
                                not apart(item, self.items, segment.beside, True) if segment.beside else
                                segment.owner is not None and segment.copied):
                            self._refuse_write(segment, buffer, stream, item, writes)
                        if segment.reads:
                            for other, read in segment.reads.items():
                                if read > clock[other]:
                                    self._refuse_write(segment, buffer, stream, item, writes)
                            segment.reads.clear()
                        segment.owner, segment.write_stream, segment.write_at = buffer, stream, at
                        segment.copied = copied
                    copied = False  # the other spans of a Copy are margins
            elif kind is Record:
                clock = events[item.event] = clocks[stream].copy()  # type: ignore[union-attr]
                clock[stream] = len(positions[stream]) - 1
            elif kind is Wait:
                recorded = events.get(item.event)  # type: ignore[union-attr]
                if recorded is None:
                    raise ProgramError(f"{self.name}: {item.stream} waits for event "
                                       f"{item.event}, which nothing recorded before")  # type: ignore[union-attr]
                clocks[stream][:] = map(max, clocks[stream], recorded)
            else:
                self._release(item, stream, reads)  # type: ignore[arg-type]

    def _check_outward(self, item: Copy, writes: Touched) -> bool:
        """Raise unless a target that may be written in part holds what the rest of it is to keep; whether what the copy
        brings must be read."""
        if not writes.shared:
            return False
        segments, buffer = writes.shared[0]
        if writes_in_part(item):
            for segment in segments:
                if segment.owner != buffer:
                    raise ProgramError(f"{self.name}: {item.label} writes some rows of "
                                       f"{self._spanat(segment, buffer, writes.spans)}, which holds "
                                       f"{segment.owner or 'nothing'} by then")
        return item.stream not in OUTWARD or buffer not in self.kept

    def _release(self, item: Release, stream: int, freed: Touched) -> None:
        span, clock = item.span, self.clocks[stream]
        for run in freed.private if self.private else ():
            owners, where, meant = run
            if owners[where] != meant:
                self._refuse_release(next(o for o in owners_of(run) if o != span.buffer), span)
            owners[where] = None if type(where) is int else [None] * len(meant)
        for segments, buffer in freed.shared:
            for segment in segments:
                if segment.owner != buffer or segment.copied:
                    self._refuse_release(segment.owner, span)
                for other, read in segment.reads.items():
                    if read > clock[other]:
                        raise ProgramError(f"{self.name}: {span_text(span)} is released on {item.stream} while "
                                           f"{_label(self.items[other][read])} on {self.streams[other]} may still "
                                           "read it")
                segment.owner = None

    def _check_free(self, item: Item, touched: Touched, run: TouchedRun) -> None:
        buffer = buffer_of(run)
        if any(owner is not None and owner != buffer for owner in owners_of(run)):
            self._refuse_private(item, touched, run, "writes")

    def _refuse_private(self, item: Item, touched: Touched, run: TouchedRun, what: str) -> None:
        owners, where, _ = run
        buffer, first = buffer_of(run), where if type(where) is int else where.start
        found = owners_of(run)
        i = next(i for i, owner in enumerate(found) if owner != buffer and (what == "reads" or owner is not None))
        arena = next(arena for arena, kept in self.held.items() if kept is owners)
        point = self.cuts[arena][first + i]
        span = next(span_text(s) for s in touched.spans
                    if s.buffer == buffer and s.arena == arena and s.offset <= point < s.offset + s.nbytes)
        if what == "reads":
            raise ProgramError(f"{self.name}: {_label(item)} reads {span}, which holds {found[i] or 'nothing'} by then")
        raise ProgramError(f"{self.name}: {_label(item)} writes {span}, where {found[i]} still lives")

    def _refuse_read(self, segment: Segment, buffer: str, stream: int, item: Item, touched: Touched) -> None:
        label, span = _label(item), self._spanat(segment, buffer, touched.spans)
        if segment.owner != buffer:
            raise ProgramError(f"{self.name}: {label} reads {span}, which holds {segment.owner or 'nothing'} by then")
        raise ProgramError(f"{self.name}: {label} on {self.streams[stream]} reads {span} without waiting for "
                           f"{self._writer(segment)}")

    def _refuse_write(self, segment: Segment, buffer: str, stream: int, item: Item, touched: Touched) -> None:
        clock, here, label = self.clocks[stream], self.streams[stream], _label(item)
        span = self._spanat(segment, buffer, touched.spans)
        if segment.copied and segment.owner is not None:
            raise ProgramError(f"{self.name}: {label} overwrites {segment.owner}, loaded and never read")
        for other, read in segment.reads.items():
            if read > clock[other]:
                raise ProgramError(f"{self.name}: {label} on {here} overwrites {span} while "
                                   f"{_label(self.items[other][read])} on {self.streams[other]} may still read "
                                   f"{segment.owner or 'it'} there")
        if segment.write_at > clock[segment.write_stream]:
            raise ProgramError(f"{self.name}: {label} on {here} overwrites {span} while {self._writer(segment)} may "
                               "still write there")
        raise ProgramError(f"{self.name}: {label} writes {span}, where {segment.owner} still lives")

    def _writer(self, segment: Segment) -> str:
        stream = segment.write_stream
        return f"{_label(self.items[stream][segment.write_at])} on {self.streams[stream]}"

    def _spanat(self, segment: Segment, buffer: str, spans: tuple[Span, ...]) -> str:
        """The one of an item's spans that covers the segment, as text."""
        return next((span_text(s) for s in spans if s.buffer == buffer
                     and segment in self._ranges[s.arena, s.offset, s.nbytes][2]), buffer)

    def _refuse_release(self, owner: str | None, span: Span) -> None:
        if owner != span.buffer:
            raise ProgramError(f"{self.name}: {span_text(span)} is released, but holds "
                               f"{owner or 'nothing: it was released before'}")
        raise ProgramError(f"{self.name}: {span.buffer} is loaded and released without being read")


def _label(item: Item | None) -> str:
    return item.label if isinstance(item, Launch | Copy) else ""
