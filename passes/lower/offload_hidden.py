"""Hidden states off the device: what outlives a micro-batch's turn goes out behind it, and comes back before the next.

Micro-batches whose hidden states leave the device share a few regions of its memory (`HiddenPlacement.regions`).
The draft has their launches at these addresses already, one micro-batch after the other; here the copies between them
are added, as they follow from who touches which contents: behind the last launch of a turn what is still needed and was
written is stored, and what a turn reads of what was stored is loaded as soon as its region is vacant. What stands in a
region and was not changed has not to go out again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from forebay.rewriter.ir.alignment import whole_pages
from forebay.rewriter.ir.cache_layout import CACHE_STAGING
from forebay.rewriter.ir.draft import Arrive, Draft, Evict, Fetch, Found, Free, Lookup, Move, Outgoing, Store, Vacant
from forebay.rewriter.ir.hidden_layout import (
    HIDDEN_HOME_ARENAS,
    HIDDEN_STAGING,
    HIDDEN_STORE_STAGING,
    hidden_home_name,
    offloaded_regions,
    region_buffers,
)
from forebay.rewriter.ir.plan import BufferPlacement, Plan
from forebay.rewriter.ir.program import Item, Launch, Release, Rows, Span, span_of


@dataclass
class _Stay:
    """Items of a draft, up to number `last`, that touch contents of one micro-batch in a region: what it loads of them,
    each before the item that touches it first, and what it leaves there, to be stored if it is `written`."""

    micro_batch: int
    region: int
    last: int = 0
    loads: dict[str, int] = field(default_factory=dict)
    there: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    lookups: dict[int, str] = field(default_factory=dict)  # under way


def offload_hidden(draft: Draft, plan: Plan) -> None:
    """Put the copies of hidden states that leave the device, and the marks of their regions, among a draft's items."""
    if plan.schedule.batching.hidden.tier != "device":
        _Offloading(draft, plan).run()


class _Offloading:
    def __init__(self, draft: Draft, plan: Plan) -> None:
        self.draft, self.batching, buffers = draft, plan.schedule.batching, plan.buffers
        own = region_buffers(buffers, self.batching)
        taken = dict.fromkeys(HIDDEN_HOME_ARENAS, 0)
        self.away: dict[str, tuple[int, int]] = {}  # contents -> micro-batch, region
        self.home: dict[str, tuple[BufferPlacement, int]] = {}  # contents -> where they wait, and the offset
        places = {b.name: b for b in buffers}
        for k, (region, tier) in offloaded_regions(self.batching).items():
            for name, b in own.items():
                contents, home = f"{name}@{k}", places[hidden_home_name(tier)]
                self.away[contents] = k, region
                self.home[contents] = home, home.offset + taken[tier]
                taken[tier] += whole_pages(b.nbytes)
        self.extents: dict[str, Span] = {}
        self.before: dict[int, list] = {}  # by number of an item, what comes in front of it, and behind it
        self.behind: dict[int, list] = {}
        self.dropped: set[int] = set()  # numbers of items
        self.loaded: dict[str, int] = {}  # contents -> the number of the move that brought them last

    def run(self) -> None:
        turns = self._turns()
        for b in {id(b): b for b, _ in self.home.values()}.values():
            self.draft.resident[b.name] = Span(b.arena, b.offset, b.nbytes, b.name)
            if b.arena == CACHE_STAGING:
                self.draft.files[CACHE_STAGING] = max(self.draft.files.get(CACHE_STAGING, 0), b.offset + b.nbytes)
        following = {id(turn): later for region in {turn.region for turn in turns}
                     for turn, later in itertools.pairwise(t for t in turns if t.region == region)}
        delay = 1 if self.batching.hidden.slots > 2 else 0  # so that a store has a turn's time
        waiting: list[tuple[int, _Stay, list]] = []
        for n, turn in enumerate(turns):
            evicts = self._leave(turn)
            waiting.append((n, turn, evicts))
            after = following.get(id(turn))
            at_once = after is not None and n + 1 < len(turns) and turns[n + 1] is after
            while waiting and (at_once or n == len(turns) - 1 or waiting[0][0] <= n - delay):
                number, earlier, marks = waiting.pop(0)
                given = self.behind.setdefault(turn.last, [])
                stored = tuple(mark.index for mark in marks if isinstance(mark, Evict))
                given += [*marks, Vacant(HIDDEN_STAGING, earlier.region, number, stored)]
                if (later := following.get(id(earlier))) is not None:
                    given += self._load(later)
        self.draft.items = list(self._placed())

    def _placed(self) -> Iterator[Item]:
        for i, item in enumerate(self.draft.items):
            yield from self.before.get(i, ())
            if i not in self.dropped:
                yield item  # type: ignore[misc]
            yield from self.behind.get(i, ())

    def _turns(self) -> list[_Stay]:
        """The turns of all micro-batches in the regions that they share, in order."""
        turns: list[_Stay] = []
        alive: set[str] = set()
        found: dict[int, str] = {}  # lookups that write such contents

        def turn_of(name: str, i: int) -> _Stay:
            k, region = self.away[name]
            if not turns or turns[-1].micro_batch != k:
                turns.append(_Stay(k, region))
            turns[-1].last = i
            return turns[-1]

        for i, item in enumerate(self.draft.items):
            if isinstance(item, Release):
                name = item.span.buffer
                if name in self.away:
                    alive.discard(name)
                    if name in turns[-1].there:
                        turns[-1].last = i
                        turns[-1].there.discard(name)
                    else:
                        self.dropped.add(i)  # it ends where it waits
                continue
            if isinstance(item, Found) and item.index in found:
                if turns[-1].lookups.pop(item.index, None) is None:
                    self.dropped.add(i)  # waited for where its turn ended
                else:
                    turn_of(found[item.index], i)
            reads, writes = _touched(item)
            for span in reads:
                if span.buffer in self.away:
                    turn = turn_of(span.buffer, i)
                    if span.buffer not in turn.there and span.buffer in alive:
                        turn.loads[span.buffer] = i
                        turn.there.add(span.buffer)
                    self._extend(span)
            for span in writes:
                if span.buffer in self.away:
                    turn = turn_of(span.buffer, i)
                    turn.there.add(span.buffer)
                    turn.written.add(span.buffer)
                    alive.add(span.buffer)
                    self._extend(span)
                    if isinstance(item, Lookup):
                        found[item.index] = turn.lookups[item.index] = span.buffer
        return turns

    def _extend(self, span: Span) -> None:
        """Count the bytes of a span as the contents'."""
        known = self.extents.get(span.buffer, span)
        low = min(known.offset, span.offset)
        high = max(known.offset + known.nbytes, span.offset + span.nbytes)
        self.extents[span.buffer] = Span(span.arena, low, high - low, span.buffer)

    def _leave(self, turn: _Stay) -> list:
        """Store behind a turn what it wrote and leaves; the marks that end the contents of its region."""
        given, marks = self.behind.setdefault(turn.last, []), list[object]()
        given += [Found(index) for index in turn.lookups]
        for name in sorted(turn.there):
            if name in turn.written:
                number = len(self.draft.stores)
                source = self.extents[name]
                self.draft.stores.append(Outgoing(
                    f"store {name}", source, self._home(name), whole_pages(source.nbytes) - source.nbytes,
                    number % 2, HIDDEN_STORE_STAGING))
                given.append(Store(number))
                marks.append(Evict(number))
            else:
                marks.append(Free(self.loaded[name]))
        return marks

    def _load(self, turn: _Stay) -> list:
        """Load the first inputs of a turn: the actions at a vacant region."""
        fetches: list[object] = []
        for name, reader in turn.loads.items():
            index = self.loaded[name] = len(self.draft.moves)
            self.draft.moves.append(Move(f"load {name}", self._home(name), turn.region, self.extents[name], (0, 0),
                                         HIDDEN_STAGING))
            fetches.append(Fetch(index))
            self.before.setdefault(reader, []).append(Arrive(index))
        return fetches

    def _home(self, name: str) -> Span:
        """Return the place of contents between turns."""
        home, offset = self.home[name]
        return Span(home.arena, offset, self.extents[name].nbytes, home.name)


def _touched(item: object) -> tuple[list[Span], list[Span]]:
    """Return the device memory that an item of a draft reads and writes."""
    if isinstance(item, Launch):
        return list(item.reads), list(item.writes)
    if isinstance(item, Lookup):
        named = item.source.index_tensors if isinstance(item.source, Rows) else ()
        return [span_of(ref) for ref in named], [item.span]
    return [], []
