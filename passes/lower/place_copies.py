"""Turn a draft's marks into copies, and the events that order them: the `Program`."""

from __future__ import annotations

from forebay.passes.lower.draft import Arrive, Draft, Fetch, Found, Free, Lookup, Move
from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.ir.plan import BufferPlacement, Plan
from forebay.rewriter.ir.program import (
    COMPUTE,
    DISK,
    LOOKUP,
    UPLOAD,
    Copy,
    FileSlice,
    Item,
    Program,
    Record,
    Release,
    Span,
    Wait,
)


def place_copies(draft: Draft, plan: Plan) -> Program:
    """The Program of a draft. A Fetch becomes a Copy behind a Wait for its slot and before a Record; an Arrive waits
    for that Record; a Free becomes a Release and a Record, which the slot's next Copy waits for. With `host_hop` reads
    land in host slots first, and a second Copy takes them to the device."""
    return _Placing(draft, plan).run()


class _Placing:
    def __init__(self, draft: Draft, plan: Plan) -> None:
        self.draft, self.plan = draft, plan
        self.slots: dict[str, BufferPlacement] = {b.name: b for b in plan.buffers if b.kind in ("slot", "io")}
        self.items: list[Item] = []
        self.prologue: list[Item] = []
        self.events: dict[object, int] = {}
        self.freed: dict[str, int] = {}  # slot -> event recorded when its last contents were released

    def run(self) -> Program:
        draft = self.draft
        self._open_free_slots()
        for index in draft.prologue:
            self._fetch(index, self.prologue)
        add = self.items.append
        for item in draft.items:
            kind = type(item)
            if kind is Fetch:
                self._fetch(item.index, self.items)  # type: ignore[union-attr]
            elif kind is Arrive:
                add(Wait(COMPUTE, self._event("landed", item.index)))  # type: ignore[union-attr]
            elif kind is Free:
                self._free(item.index)  # type: ignore[union-attr]
            elif kind is Lookup:
                self._lookup(item)  # type: ignore[arg-type]
            elif kind is Found:
                add(Wait(COMPUTE, self._event("found", item.index)))  # type: ignore[union-attr]
            else:
                add(item)  # type: ignore[arg-type]
        return Program(draft.name, tuple(self.items), tuple(self.prologue), dict(self.plan.arenas), draft.resident,
                       draft.inputs, draft.outputs)

    def _event(self, *key: object) -> int:
        """One event per key: a copy issued in the prologue and again at the end of a step records the same one."""
        return self.events.setdefault(key, len(self.events) + 1)

    def _open_free_slots(self) -> None:
        """Slots that no copy in flight occupies are free for this step once the step before has computed. Host slots
        count one by one: a copy in flight may come from host memory and leave its host slot alone."""
        slots, moves = self.plan.schedule.slots, len(self.draft.moves)
        if len(self.draft.prologue) < min(slots, moves) or (self.plan.schedule.host_hop and moves):
            top = self._event("top")
            self.items.append(Record(COMPUTE, top))
            self.freed = {f"{kind}{i}": top for kind in ("slot", "host_slot") for i in range(slots)}

    def _fetch(self, index: int, into: list[Item]) -> None:
        move = self.draft.moves[index]
        slot = f"slot{move.slot}"
        landed = self._event("landed", index)  # the same in every program's prologue: steps hand copies to each other
        waits = into is self.items
        if self.plan.schedule.host_hop and isinstance(move.source, FileSlice):
            self._two_hops(index, move, into, waits)
            into.append(Record(UPLOAD, landed))
            return
        stream = DISK if isinstance(move.source, FileSlice) else UPLOAD
        if waits and slot in self.freed:
            into.append(Wait(stream, self.freed[slot]))
        into.append(Copy(stream, move.source, move.span, move.label, room=move.room))
        into.append(Record(stream, landed))

    def _two_hops(self, index: int, move: Move, into: list[Item], waits: bool) -> None:
        slot, host = f"slot{move.slot}", f"host_slot{move.slot}"
        assert isinstance(move.source, FileSlice)
        landing, room = landing_of(move.source, self.slots[host], move.span.nbytes, f"{host}:{index}")
        if waits and host in self.freed:
            into.append(Wait(DISK, self.freed[host]))
        into.append(Copy(DISK, move.source, landing, move.label, room=room))
        arrived = self._event("arrived", index)
        into += [Record(DISK, arrived), Wait(UPLOAD, arrived)]
        if waits and slot in self.freed:
            into.append(Wait(UPLOAD, self.freed[slot]))
        into.append(Copy(UPLOAD, landing, move.span, move.label.replace("fetch", "upload")))
        into.append(Release(UPLOAD, _widen(landing, room)))
        left = self.freed[host] = self._event("left", index)
        into.append(Record(UPLOAD, left))

    def _free(self, index: int) -> None:
        move = self.draft.moves[index]
        event = self.freed[f"slot{move.slot}"] = self._event("freed", index)
        self.items += [Release(COMPUTE, _widen(move.span, move.room)), Record(COMPUTE, event)]

    def _lookup(self, found: Lookup) -> None:
        ready, landed = self._event("ready", found.index), self._event("found", found.index)
        self.items += [Record(COMPUTE, ready), Wait(LOOKUP, ready)]
        if not self.plan.schedule.host_hop:
            self.items += [Copy(LOOKUP, found.source, found.span, found.label, found.layer), Record(LOOKUP, landed)]
            return
        rows = self.slots["host_rows"]
        landing = Span(rows.arena, rows.offset, found.span.nbytes, f"host_rows:{found.index}")
        arrived, uploaded = self._event("rows", found.index), self.freed.get("host_rows")
        if uploaded is not None:
            self.items.append(Wait(LOOKUP, uploaded))
        self.items += [Copy(LOOKUP, found.source, landing, found.label, found.layer), Record(LOOKUP, arrived),
                       Wait(UPLOAD, arrived), Wait(UPLOAD, ready),
                       Copy(UPLOAD, landing, found.span, found.label, found.layer), Release(UPLOAD, landing),
                       Record(UPLOAD, landed)]
        self.freed["host_rows"] = landed


def landing_of(
    source: FileSlice | None, slot: BufferPlacement, nbytes: int, buffer: str, itemsize: int = 1
) -> tuple[Span, tuple[int, int]]:
    """Where in a slot bytes land, and the room around them: what comes from a file lies congruent with it to a page,
    where elements stay aligned, so that it can be read in place. ValueError where they do not fit."""
    shift = after = 0
    if source is not None and source.offset % itemsize == 0:
        shift = source.offset % PAGE_NBYTES
        after = -(shift + nbytes) % PAGE_NBYTES
    if shift + nbytes + after > slot.nbytes:
        raise ValueError(f"lower: {nbytes} bytes do not fit {slot.name} of {slot.nbytes} bytes")
    return Span(slot.arena, slot.offset + shift, nbytes, buffer), (shift, after)


def _widen(span: Span, room: tuple[int, int]) -> Span:
    return Span(span.arena, span.offset - room[0], span.nbytes + sum(room), span.buffer)
