"""Turn a draft's marks into copies, and the events that order them: the `Program`."""

from __future__ import annotations

from dataclasses import replace

from forebay.passes.lower.order_copies import Order
from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.ir.cache_layout import OPERANDS
from forebay.rewriter.ir.draft import (
    Arrive,
    Draft,
    Evict,
    Exchanged,
    Fetch,
    Found,
    Free,
    Lookup,
    Move,
    Outgoing,
    Store,
    Vacant,
)
from forebay.rewriter.ir.plan import BufferPlacement, Plan
from forebay.rewriter.ir.program import (
    ATTEND,
    COLLECT,
    COMPUTE,
    DISK,
    DOWNLOAD,
    HOST,
    LOAD,
    LOOKUP,
    RETURN,
    UPLOAD,
    WRITE,
    Copy,
    FileSlice,
    Item,
    Launch,
    Program,
    Record,
    Release,
    Rows,
    Span,
    Wait,
    place_of,
    tier_of,
)
from forebay.rewriter.ir.schedule.routed_fetch import LANDING

WEIGHTS = "slot"  # the ring of those, which alone are carried over from step to step
# Streams that touch what outlives a step on the slower tiers.
OFF_DEVICE_STREAMS = (LOAD, UPLOAD, DOWNLOAD, WRITE, ATTEND, RETURN)


def place_copies(draft: Draft, plan: Plan) -> Program:
    """The Program of a draft. A Fetch becomes a Copy behind a Wait for its slot and before a Record; an Arrive waits
    for that Record; a Free becomes a Release and a Record, which the slot's next Copy waits for. A Store becomes a
    Record behind its source's launches and a Copy that waits for it, and for whoever still touches its target; an
    Evict waits until the source has been read. With `host_hop` bytes from and to files land in host slots first, and a
    second Copy takes them on."""
    return _Placing(draft, plan).run()


class _Placing:
    def __init__(self, draft: Draft, plan: Plan) -> None:
        self.draft, self.plan = draft, plan
        self.slots: dict[str, BufferPlacement] = {b.name: b for b in plan.buffers if b.kind in ("slot", "io")}
        self.items: list[Item] = []
        self.prologue: list[Item] = []
        self.events: dict[object, int] = {}
        self.freed: dict[str, int] = {}  # slot -> event recorded when its last contents were released
        self.leaving: dict[str, tuple[Span, int]] = {}  # host slot -> what is on its way out of it, and the event then
        self.order = Order()
        self.orders = bool(draft.stores)  # without any, slots order all there is
        self.behind_top: set[str] = set()  # streams that waited for what frees slots at the top of a step
        self.sent: dict[str, int] = {}  # collectives of the step by their labels, in order
        self.waited = -1  # the last of them that launches waited for
        self.behind = True  # launches computed since one was told to wait for them

    def run(self) -> Program:
        draft = self.draft
        self.order.watch(_place_offload(draft))
        for index in draft.prologue:
            self._fetch(index, self.prologue)
        self._step()
        if self.orders:
            self._later_step()
        return Program(draft.name, tuple(self.items), tuple(self.prologue), dict(self.plan.arenas), draft.resident,
                       draft.inputs, draft.outputs, files=draft.files, in_place=self.plan.in_place)

    def _step(self) -> None:
        self.items, self.sent, self.waited, self.behind, self.behind_top = [], {}, -1, True, set()
        self._open_free_slots()
        exchanged: list[str] = []
        for item in self.draft.items:
            kind = type(item)
            if kind is Exchanged:
                exchanged.append(item.label)  # type: ignore[union-attr]
                continue
            self._exchanged(exchanged)
            if kind is Fetch:
                self._fetch(item.index, self.items)  # type: ignore[union-attr]
            elif kind is Arrive:
                self._wait(item.stream, self._event("landed", item.index))  # type: ignore[union-attr]
            elif kind is Free:
                self._free(item)  # type: ignore[arg-type]
            elif kind is Store:
                self._store(item.index)  # type: ignore[union-attr]
            elif kind is Evict:
                self._evict(item.index)  # type: ignore[union-attr]
            elif kind is Vacant:
                self._vacant(item)  # type: ignore[arg-type]
            elif kind is Lookup:
                self._lookup(item)  # type: ignore[arg-type]
            elif kind is Found:
                self._wait(COMPUTE, self._event("found", item.index))  # type: ignore[union-attr]
            elif kind is Launch and item.stream == ATTEND:  # type: ignore[union-attr]
                self._attend(item)  # type: ignore[arg-type]
            elif kind is Launch and item.stream == COLLECT:  # type: ignore[union-attr]
                self._exchange(item)  # type: ignore[arg-type]
            else:
                self._add(item)  # type: ignore[arg-type]
        self._exchanged(exchanged)
        for slot in tuple(self.leaving):
            self._vacate(slot)

    def _later_step(self) -> None:
        """The step anew, as one that follows another: what it waits for of the step before are the copies in flight
        that a prologue records too, else all that was issued on their stream."""
        before = {stream: self._event("before", stream) for stream in OFF_DEVICE_STREAMS}
        told = any(isinstance(move.source, Rows) and move.source.index_tensors for move in self.draft.moves)
        self.order.next_step(before, {self._event("landed", index) for index in self.draft.prologue}, told)
        self._step()
        waited = {item.event for item in self.items if type(item) is Wait}
        self.items[:0] = [Record(stream, event) for stream, event in before.items() if event in waited]

    def _event(self, *key: object) -> int:
        """One event per key: a copy issued in the prologue and again at the end of a step records the same one."""
        return self.events.setdefault(key, len(self.events) + 1)

    def _add(self, item: Item, into: list[Item] | None = None) -> None:
        (self.items if into is None else into).append(item)
        self.behind |= item.stream == COMPUTE and type(item) in (Launch, Copy, Wait)
        if self.orders:
            self.order.follow(item)

    def _wait(self, stream: str, *events: int, into: list[Item] | None = None) -> None:
        if self.orders:
            events = tuple(self.order.missing(stream, events))
        for event in events:
            self._add(Wait(stream, event), into)

    def _open_free_slots(self) -> None:
        """Slots that no copy in flight occupies are free for this step once the step before has computed. Host slots
        count one by one: a copy in flight may come from host memory and leave its host slot alone."""
        moves, self.freed = self.draft.moves, {}
        slots = {f"{move.ring}{move.slot}" for move in moves}
        taken = {f"{moves[index].ring}{moves[index].slot}" for index in self.draft.prologue}
        if slots - taken or (self.plan.schedule.host_hop and moves):
            top = self._event("top")
            self._add(Record(COMPUTE, top))
            self.freed = {kind + slot: top for kind in ("", "host_") for slot in slots}
        for index in self.draft.prologue:
            if ("left", index) in self.events:
                self.freed[f"host_{moves[index].ring}{moves[index].slot}"] = self._event("left", index)

    def _fetch(self, index: int, into: list[Item]) -> None:
        move = self.draft.moves[index]
        slot, source = f"{move.ring}{move.slot}", place_of(move.source)
        landed = self._event("landed", index)  # the same in every program's prologue: steps hand copies to each other
        hops = self.plan.schedule.host_hop and tier_of(source) == "disk"
        near = UPLOAD if move.ring == WEIGHTS else RETURN
        stream = near if tier_of(source) == "host" else DISK if isinstance(source, FileSlice) else LOAD
        if hops:
            self._two_hops(index, move, (stream, near), into, into is self.items)
        else:
            free: tuple[int, ...] = (self.freed[slot],) if into is self.items and slot in self.freed else ()
            if move.computed:
                free += (self._event("named", index),)
                self._add(Record(COMPUTE, free[-1]), into)
            copy = Copy(stream, move.source, move.span, move.label, move.layer, move.room)
            self._place_offload(copy, source, landed, free, into)
            if move.ring == OPERANDS:
                assert isinstance(source, Span)
                self._add(Release(stream, source), into)
        self._add(Record(near if hops else stream, landed), into)

    def _two_hops(self, index: int, move: Move, streams: tuple[str, str], into: list[Item], waits: bool) -> None:
        stream, near = streams
        slot, host, source = f"{move.ring}{move.slot}", f"host_{move.ring}{move.slot}", place_of(move.source)
        landing, room = landing_of(source, self.slots[host], move.span.nbytes, f"{host}:{index}")
        free = (self.freed[host],) if waits and host in self.freed else ()
        come = self._event("arrived", index)
        self._place_offload(Copy(stream, move.source, landing, move.label, move.layer, room), source, come, free, into)
        self._add(Record(stream, come), into)
        self._wait(near, come, *((self.freed[slot],) if waits and slot in self.freed else ()), into=into)
        onward = _among(landing, move.source) if move.alike else landing
        label = move.label.replace("fetch", "upload").replace("load cache", "upload cache")
        self._add(Copy(near, onward, move.span, label, move.layer), into)
        self._add(Release(near, _widen(landing, room)), into)
        left = self.freed[host] = self._event("left", index)
        self._add(Record(near, left), into)

    def _place_offload(
        self, copy: Copy, place: FileSlice | Span, event: int, after: tuple[int, ...], into: list[Item]
    ) -> None:
        """Place a copy that touches `place` on a slower tier, behind the events `after` and whoever must have touched
        it before; `event` will stand for it."""
        writes = place is place_of(copy.dst)
        span = place if isinstance(place, Span) and self.orders else None
        if self.orders:
            after = tuple(self.order.missing(copy.stream, after, span, writes))
        elif after == (self.events.get(("top",)),):
            after = () if copy.stream in self.behind_top else after
            self.behind_top.add(copy.stream)
        for earlier in after:
            self._add(Wait(copy.stream, earlier), into)
        self._add(copy, into)
        if span is not None:
            self.order.touch(copy.stream, span, event, writes)

    def _attend(self, launch: Launch) -> None:
        """Place a launch of the host, behind whoever must have touched its memory before; its operands end with it."""
        touched = [(span, writes) for spans, writes in ((launch.reads, False), (launch.writes, True)) for span in spans
                   if span.arena == HOST]
        self._wait(ATTEND, *dict.fromkeys(event for span, writes in touched
                                          for event in self.order.missing(ATTEND, (), span, writes)))
        self._add(launch)
        for span in launch.reads:
            if span.buffer.startswith(OPERANDS):
                self._add(Release(ATTEND, span))
        done = self._event("attended", launch.label)
        self._add(Record(ATTEND, done))
        for span, writes in touched:
            self.order.touch(ATTEND, span, done, writes)

    def _exchange(self, launch: Launch) -> None:
        """Place a collective behind what computes its operand, or used its memory before, unless one is there already,
        and before whoever reads what it gives."""
        if self.behind:
            ready = self._event("ready to exchange", launch.label)
            self._add(Record(COMPUTE, ready))
            self._wait(COLLECT, ready)
            self.behind = False
        self.sent[launch.label] = len(self.sent)
        self._add(launch)
        self._add(Record(COLLECT, self._event("exchanged", launch.label)))

    def _exchanged(self, labels: list[str]) -> None:
        """Wait for the last of some collectives, unless that was done for a later one: they are made in order."""
        last = max(labels, key=self.sent.__getitem__, default=None)
        if last is not None and self.sent[last] > self.waited:
            self.waited = self.sent[last]
            self._wait(COMPUTE, self._event("exchanged", last))
        labels.clear()

    def _free(self, left: Free) -> None:
        move = self.draft.moves[left.index]
        event = self.freed[f"{move.ring}{move.slot}"] = self._event("freed", left.index)
        self._add(Release(left.stream, _widen(move.span, move.room)))
        self._add(Record(left.stream, event))

    def _vacant(self, left: Vacant) -> None:
        event = self.freed[f"{left.ring}{left.slot}"] = self._event("vacant", left.ring, left.slot, left.number)
        self._add(Record(COMPUTE, event))
        if self.orders:
            self.order.stand_for(event, [self._stored(index) for index in left.stores])

    def _store(self, index: int) -> None:
        out = self.draft.stores[index]
        ready, stored = self._event("ready to store", index), self._event("stored", index)
        stream = DOWNLOAD if tier_of(out.target) == "host" else WRITE
        self._add(Record(COMPUTE, ready))
        source: Rows | Span = out.source
        if stream == WRITE and self.plan.schedule.host_hop:
            source, ready = self._download(index, out, ready)
        copy = Copy(stream, source, out.target, out.label, out.layer, (0, out.room))
        self._place_offload(copy, place_of(out.target), stored, (ready,), self.items)
        self._add(Record(stream, stored))
        if isinstance(source, Span) and source.arena == "host":
            self.leaving[f"host_{out.ring}{out.slot}"] = source, stored

    def _download(self, index: int, out: Outgoing, ready: int) -> tuple[Span, int]:
        """Bring what is to be stored into its host slot; where it lies then, and the event of that."""
        host, nbytes = f"host_{out.ring}{out.slot}", out.source.nbytes
        landing, _ = landing_of(None, self.slots[host], nbytes, f"{host}:{index}")
        self._vacate(host)
        self._wait(DOWNLOAD, ready)
        source = out.source
        if out.alike:
            assert isinstance(source, Span)
            source = _among(source, out.target)
        self._add(Copy(DOWNLOAD, source, landing, out.label.replace("store", "download"), out.layer))
        downloaded = self._event("downloaded", index)
        self._add(Record(DOWNLOAD, downloaded))
        return landing, downloaded

    def _vacate(self, slot: str) -> None:
        """End the contents of a host slot once they have been written."""
        if slot in self.leaving:
            landing, stored = self.leaving.pop(slot)
            self._wait(DOWNLOAD, stored)
            self._add(Release(DOWNLOAD, landing))

    def _stored(self, index: int) -> int:
        """The event of a store's source having been read, and what says which rows of the target."""
        target = self.draft.stores[index].target
        told = isinstance(target, Rows) and target.index_tensors
        return self._event("downloaded" if ("downloaded", index) in self.events and not told else "stored", index)

    def _evict(self, index: int) -> None:
        """Wait until the source has been read, and what says which rows of the target."""
        out = self.draft.stores[index]
        self._wait(COMPUTE, self._stored(index))
        if not out.keeps:
            source = place_of(out.source)
            assert isinstance(source, Span)
            self._add(Release(COMPUTE, source))

    def _lookup(self, found: Lookup) -> None:
        if found.source.keeps and self.plan.schedule.host_hop:
            self._fetch_named(found)
            return
        ready, landed = self._event("ready", found.index), self._event("found", found.index)
        if not (self.items and type(self.items[-1]) is Record and self.items[-1].stream == LOOKUP) or (
                self.plan.schedule.host_hop):  # else the one before it waited for as much
            self._add(Record(COMPUTE, ready))
            self._wait(LOOKUP, ready)
        if not self.plan.schedule.host_hop:
            self._add(Copy(LOOKUP, found.source, found.span, found.label, found.layer))
            self._add(Record(LOOKUP, landed))
            return
        rows = self.slots["host_rows"]
        landing = Span(rows.arena, rows.offset, found.span.nbytes, f"host_rows:{found.index}")
        arrived, uploaded = self._event("rows", found.index), self.freed.get("host_rows")
        if uploaded is not None:
            self._wait(LOOKUP, uploaded)
        self._add(Copy(LOOKUP, found.source, landing, found.label, found.layer))
        self._add(Record(LOOKUP, arrived))
        self._wait(UPLOAD, arrived)
        self._wait(UPLOAD, ready)
        self._add(Copy(UPLOAD, landing, found.span, found.label, found.layer))
        self._add(Release(UPLOAD, landing))
        self._add(Record(UPLOAD, landed))
        self.freed["host_rows"] = landed

    def _fetch_named(self, found: Lookup) -> None:
        """Bring experts into a pool from host memory, where those of a file land first; weights ahead are on UPLOAD.
        Launches before have waited for the experts that came before these."""
        source, label, landing, arrived = found.source, found.label, None, self._event("ready", found.index)
        self._add(Record(COMPUTE, arrived))
        if isinstance(source.table, FileSlice):
            self._wait(LOOKUP, arrived)
            memory, arrived = self.slots[LANDING], self._event("rows", found.index)
            landing = Span(memory.arena, memory.offset, source.nbytes, f"{LANDING}:{found.index}")
            self._add(Copy(LOOKUP, replace(source, keeps=False, spares=()), landing, label, found.layer))
            self._add(Record(LOOKUP, arrived))
            source, label = replace(source, table=landing, alike=True), label.replace("fetch", "upload")
        self._wait(RETURN, arrived)
        self._add(Copy(RETURN, source, found.span, label, found.layer))
        if landing is not None:
            self._add(Release(RETURN, landing))
        self._add(Record(RETURN, self._event("found", found.index)))


def _place_offload(draft: Draft) -> list[Span]:
    """The bytes on slower tiers that a draft with stores touches, but for those of read-only files."""
    if not draft.stores:
        return []
    places = [*(place_of(move.source) for move in draft.moves), *(place_of(out.target) for out in draft.stores)]
    for item in draft.items:
        if type(item) is Launch and item.stream == ATTEND:
            places += [span for span in (*item.reads, *item.writes) if span.arena == HOST]
    return [place for place in places if isinstance(place, Span)]


def landing_of(
    source: FileSlice | Span | None, slot: BufferPlacement, nbytes: int, buffer: str, itemsize: int = 1
) -> tuple[Span, tuple[int, int]]:
    """Return the place in a slot where bytes land, and the room around them: what comes from a file lies congruent with
    it to a page, where elements stay aligned, so that it can be read in place. ValueError where they do not fit."""
    shift = after = 0
    begin = 0 if source is None else source.page_offset if isinstance(source, FileSlice) else source.offset
    if source is not None and begin % itemsize == 0:
        shift = begin % PAGE_NBYTES
        after = -(shift + nbytes) % PAGE_NBYTES
    if shift + nbytes + after > slot.nbytes:
        raise ValueError(f"lower: {nbytes} bytes do not fit {slot.name} of {slot.nbytes} bytes")
    return Span(slot.arena, slot.offset + shift, nbytes, buffer), (shift, after)


def _among(span: Span, named: FileSlice | Rows | Span) -> Rows | Span:
    """Return the named rows of `span`, a table of as many rows, or all of it where none are named."""
    return replace(named, table=span) if isinstance(named, Rows) else span


def _widen(span: Span, room: tuple[int, int]) -> Span:
    return Span(span.arena, span.offset - room[0], span.nbytes + sum(room), span.buffer)
