"""Which events a copy still has to wait for, so that no Wait is placed twice and none is missing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from forebay.rewriter.ir.program import COMPUTE, UNORDERED, Copy, Item, Launch, Record, Span, Wait

_VectorClock = dict[str, int]  # by stream, how many of its launches and copies are known to be done


@dataclass
class _Touch:
    """A copy that reads or writes `span` on a slower tier: number `at` of its stream, done when `event` is."""

    span: Span
    stream: str
    at: int
    event: int
    writes: bool


@dataclass
class Order:
    """Follows the items of a step as they are placed, with vector clocks over streams and events as the proof has them,
    and notes which copies touch which bytes that outlive the step (cache, hidden states) on the slower tiers."""

    _issued: _VectorClock = field(default_factory=dict)
    _known: dict[str, _VectorClock] = field(default_factory=dict)
    _events: dict[int, _VectorClock] = field(default_factory=dict)
    _recorded: dict[int, str] = field(default_factory=dict)  # by event, the stream that recorded it last
    _groups: dict[tuple[str, int, int], list[_Touch]] = field(default_factory=dict)
    _stands: dict[int, list[tuple[str, int]]] = field(default_factory=dict)  # by event, copies of other streams

    def watch(self, spans: Iterable[Span]) -> None:
        """Say which spans will be touched. Those that overlap share one list, so that only likes are compared."""
        end, arena, group = 0, "", list[_Touch]()
        for key in sorted({(s.arena, s.offset, s.nbytes) for s in spans}):
            if key[0] != arena or key[1] >= end:
                arena, end, group = key[0], 0, []
            end = max(end, key[1] + key[2])
            self._groups[key] = group

    def follow(self, item: Item) -> None:
        """Account for an item that has been placed."""
        stream, kind = item.stream, type(item)
        if kind is Launch or kind is Copy:
            at = self._issued[stream] = self._issued.get(stream, 0) + 1
            if stream not in UNORDERED:
                self._clock(stream)[stream] = at
        elif kind is Record:
            self._recorded[item.event] = stream  # type: ignore[union-attr]
            self._events[item.event] = {**self._clock(stream),  # type: ignore[union-attr]
                                        stream: self._issued.get(stream, 0)}
        elif kind is Wait:
            clock = self._clock(stream)
            for other, at in self._events.get(item.event, {}).items():  # type: ignore[union-attr]
                if clock.get(other, -1) < at:
                    clock[other] = at

    def missing(self, stream: str, events: Iterable[int] = (), span: Span | None = None, writes: bool = False
                ) -> list[int]:
        """The events that `stream` must still wait for, few of them: for what was issued before `events`, and for the
        copies that touched `span` before it is read, or written."""
        clock = self._clock(stream)
        needs: dict[int, list[tuple[str, int]]] = {}  # by event, the copies and launches that must be done
        for event in events:
            if event in self._events:
                issuer = self._recorded[event]
                needs[event] = [(issuer, self._events[event][issuer]), *self._stands.get(event, ())]
            else:
                needs[event] = [("", 0)]  # recorded behind this point alone: the proof will say
        for touch in self._groups[span.arena, span.offset, span.nbytes] if span is not None else ():
            if (writes or touch.writes) and _overlap(touch.span, span):  # type: ignore[arg-type]
                needs.setdefault(touch.event, []).append((touch.stream, touch.at))
        needs = {event: open for event, all_ in needs.items() if (open := [n for n in all_ if not _covered(n, clock)])}
        for event in tuple(needs):
            others = [self._events.get(other, {}) for other in needs if other != event]
            if all(any(_covered(need, known) for known in others) for need in needs[event]):
                del needs[event]
        return list(needs)

    def stand_for(self, event: int, others: Iterable[int]) -> None:
        """Say that who waits for `event`, whose stream waited for `others`, does so for what these stand for too."""
        issuers = [(other, self._recorded[other]) for other in others]
        self._stands[event] = [(issuer, self._events[other][issuer]) for other, issuer in issuers]

    def touch(self, stream: str, span: Span, event: int, writes: bool) -> None:
        """Note the copy placed last on `stream`, which `event` follows. Behind a write, who waits for it has waited for
        whoever touched the same bytes before."""
        group = self._groups[span.arena, span.offset, span.nbytes]
        if writes:
            group[:] = [t for t in group if not _within(t.span, span)]
        group.append(_Touch(span, stream, self._issued[stream], event, writes))

    def next_step(self, before: Mapping[str, int], carried: Collection[int], told: bool) -> None:
        """A new step begins. What earlier ones touched is done when all is that they issued on the stream, which the
        events `before` stand for from here on, or when its event is, if that is among those `carried` over. Where
        copies are `told` by inputs what to move, what the caller writes between steps counts too."""
        if told:
            self._clock(COMPUTE)[COMPUTE] = self._issued[COMPUTE] = self._issued.get(COMPUTE, 0) + 1
        for stream, event in before.items():
            self.follow(Record(stream, event))
        for group in {id(group): group for group in self._groups.values()}.values():
            for touch in group:
                if touch.event not in carried:
                    touch.event = before[touch.stream]

    def _clock(self, stream: str) -> _VectorClock:
        return self._known.setdefault(stream, {})


def _covered(need: tuple[str, int], clock: _VectorClock) -> bool:
    return clock.get(need[0], -1) >= need[1]


def _overlap(a: Span, b: Span) -> bool:
    return a.arena == b.arena and a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes


def _within(a: Span, b: Span) -> bool:
    return a.arena == b.arena and b.offset <= a.offset and a.offset + a.nbytes <= b.offset + b.nbytes
