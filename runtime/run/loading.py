"""The first step of a session, which begins while resident weights are still read.

Each of its items waits for the weights that it reads. Weights are read in the order in which items use them.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from forebay.rewriter.ir.program import COMPUTE, DISK, Copy, Item, Launch, Program, Record, Span, Wait, place_of
from forebay.runtime.devices.device import Call
from forebay.runtime.run.executor import BoundProgram


def while_loading(program: Program, load: Sequence[Copy]) -> Program:
    """Return `program` as a first step.

    The copies of `load` are in its prologue, in the order in which items read their targets. An item that reads one has
    a Wait before it. New events are negative. Copies whose targets no item reads come last.
    """
    found = _Reads(load)
    prologue, step = ([*found.gated(items)] for items in (program.prologue, program.step))
    order = [*found.order, *(i for i in range(len(load)) if i not in found.order)]
    loads = [item for n, i in enumerate(order) for item in (load[i], Record(DISK, -1 - n))]
    brought = {copy.dst.buffer for copy in load if isinstance(copy.dst, Span)}
    return replace(program, prologue=(*loads, *prologue), step=tuple(step),
                   resident={name: span for name, span in program.resident.items() if name not in brought})


class _Reads:
    """Items that read targets of `load`. `order` numbers the copies by the first item that reads their target."""

    def __init__(self, load: Sequence[Copy]) -> None:
        self.order: dict[int, int] = {}
        self._waited: dict[str, int] = {}  # by stream: the last number waited for
        self._places: dict[str, list[tuple[int, int, int]]] = {}  # by arena: begin, end, index; they share no byte
        for i, copy in enumerate(load):
            span = place_of(copy.dst)
            assert isinstance(span, Span)
            self._places.setdefault(span.arena, []).append((span.offset, span.offset + span.nbytes, i))
        for places in self._places.values():
            places.sort()

    def gated(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, each after the Wait that it needs; a wait for one copy covers all that come before it."""
        for item in items:
            numbers = [self.order.setdefault(i, len(self.order)) for span in _read(item) for i in self._met(span)]
            if numbers and max(numbers) > self._waited.get(item.stream, -1):
                self._waited[item.stream] = max(numbers)
                yield Wait(item.stream, -1 - max(numbers))
            yield item

    def _met(self, span: Span) -> list[int]:
        places = self._places.get(span.arena, [])
        first = max(0, bisect_right(places, (span.offset, 0, 0)) - 1)
        end = bisect_left(places, (span.offset + span.nbytes, 0, 0))
        return [i for begin, stop, i in places[first:end] if begin < span.offset + span.nbytes and stop > span.offset]


def _read(item: Item) -> Sequence[Span]:
    """The memory that an item reads."""
    if isinstance(item, Launch):
        return item.reads
    place = place_of(item.src) if isinstance(item, Copy) else None
    return (place,) if isinstance(place, Span) else ()


class FirstStep(BoundProgram):
    """A Program of `while_loading` on a device. `waited_s`: seconds that launches waited for weights."""

    waited_s = 0.0

    def finish(self) -> None:
        """Wait for the weights that no item of it reads."""
        last = min((i.event for i in self.program.prologue if isinstance(i, Record)), default=0)
        if (wait := self.device.bind(Wait(COMPUTE, last), None)) is not None:
            wait()

    def _ready(self, item: Item) -> Call | None:
        call = super()._ready(item)
        return call if call is None or not isinstance(item, Wait) or item.event >= 0 else self._timed(call)

    def _timed(self, call: Call) -> Call:
        def wait() -> None:
            began = time.perf_counter()
            call()
            self.waited_s += time.perf_counter() - began

        return wait
