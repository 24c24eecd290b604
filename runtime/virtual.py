"""The devices that execute nothing: clocks, for prediction."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from forebay.rewriter.program import COMPUTE, UNORDERED, Copy, Item, Launch, Program, Record, TensorRef, Wait
from forebay.runtime.device import Call


class Cost(NamedTuple):
    """Seconds of an item alone. A launch takes `slowed` times as long while copies run, and they take `slows` times as
    long beside it; a copy takes `latency_s` more, of which those under way before it on its stream hide their share,
    and `issue_s` of the issuing thread."""

    time_s: float
    slowed: float = 1.0
    slows: float = 1.0
    latency_s: float = 0.0
    issue_s: float = 0.0


CostOf = Callable[[Item], Cost]
Span = tuple[str, str, float, float]  # stream, label, start and end in seconds


@dataclass
class VirtualDevice:
    """Advances a clock per stream by the cost of each item, as a GPU's streams do; what the streams do to each other
    beside events is not counted."""

    cost: CostOf
    clocks: dict[str, float] = field(default_factory=dict)
    events: dict[int, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def allocate(self, arenas: Mapping[str, int]) -> None:
        """Nothing to allocate."""

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        """A tensor of the right shape without memory."""
        return torch.empty_strided(ref.shape, ref.stride, dtype=getattr(torch, ref.dtype), device="meta")

    @property
    def now(self) -> float:
        """Seconds at which all launches issued so far are done."""
        return self.clocks.get(COMPUTE, 0.0)

    def bind(self, item: Item, launch: Call | None) -> Call | None:
        clocks, events, stream = self.clocks, self.events, item.stream
        if isinstance(item, Launch | Copy):
            cost, label, note = self.cost(item), item.label, self.spans.append

            def advance() -> None:
                start = clocks.get(stream, 0.0)
                end = clocks[stream] = start + cost.time_s + cost.latency_s
                note((stream, label, start, end))

            return advance
        if isinstance(item, Record):
            event = item.event

            def record() -> None:
                events[event] = clocks.get(stream, 0.0)

            return record
        if isinstance(item, Wait):
            event = item.event

            def wait() -> None:
                clocks[stream] = max(clocks.get(stream, 0.0), events.get(event, 0.0))

            return wait
        return None

    def idle(self, time_s: float) -> None:
        """Let the issuing thread do something else."""
        self.clocks[COMPUTE] = self.now + time_s

    def finish(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nothing to give back."""


class _Under:
    """A copy under way or queued: seconds it still takes alone, and when it began."""

    __slots__ = ("label", "left", "start")

    def __init__(self, label: str, left: float) -> None:
        self.label, self.left, self.start = label, left, -1.0


class _Mark:
    """A record or, with `gate`, a wait in the queue of a stream: passed once it comes to the front (and `gate` was)."""

    __slots__ = ("gate", "passed")

    def __init__(self, gate: _Mark | None = None) -> None:
        self.gate, self.passed = gate, False


class VirtualThreads(VirtualDevice):
    """A machine without a GPU: the issuing thread computes, so that nothing is issued meanwhile, and what streams do to
    each other is counted: each launch is slowed by copies under way, and slows them, as its cost says.

    Copies stand in a queue per stream and progress as time passes, which only launches and waits let it do.
    """

    def __init__(self, cost: CostOf) -> None:
        super().__init__(cost)
        self.clocks[COMPUTE] = 0.0
        self._queues: dict[str, deque[_Under | _Mark]] = {}
        self._marks: dict[int, _Mark] = {}  # of the latest record of each event

    def bind(self, item: Item, launch: Call | None) -> Call | None:
        if isinstance(item, Launch):
            return self._bind_launch(item)
        if isinstance(item, Copy):
            cost, label = self.cost(item), item.label
            queue = self._queues.setdefault(item.stream, deque())

            def copy() -> None:
                ahead = sum(isinstance(x, _Under) for x in queue)
                queue.append(_Under(label, cost.time_s + cost.latency_s / (1 + ahead)))
                if cost.issue_s:
                    self.idle(cost.issue_s)

            return copy
        if isinstance(item, Record):
            return self._bind_record(item)
        return self._bind_wait(item) if isinstance(item, Wait) else None

    def _bind_launch(self, item: Launch) -> Call:
        cost, label, clocks, note = self.cost(item), item.label, self.clocks, self.spans.append

        def compute() -> None:
            start = clocks[COMPUTE]
            self._compute(cost)
            note((COMPUTE, label, start, clocks[COMPUTE]))

        return compute

    def _compute(self, cost: Cost) -> None:
        left, slowed, slows = cost[:3]
        while left > 0 and (passed := self._pass(left * slowed, slows)):
            left -= passed / slowed
        if left > 0:
            self.clocks[COMPUTE] += left

    def idle(self, time_s: float) -> None:
        self._compute(Cost(time_s))

    def _bind_record(self, item: Record) -> Call:
        queue = None if item.stream == COMPUTE else self._queues.setdefault(item.stream, deque())

        def record() -> None:
            mark = self._marks[item.event] = _Mark()
            if queue:
                queue.append(mark)
            else:
                mark.passed = True

        return record

    def _bind_wait(self, item: Wait) -> Call:
        if item.stream == COMPUTE or item.stream in UNORDERED:  # the issuing thread waits

            def wait() -> None:
                mark = self._marks.get(item.event)
                while mark is not None and not mark.passed:
                    self._pass(float("inf"), 1.0)

            return wait
        queue = self._queues.setdefault(item.stream, deque())

        def wait_there() -> None:
            mark = self._marks.get(item.event)
            if mark is not None and not mark.passed:
                queue.append(_Mark(mark))

        return wait_there

    def _pass(self, most: float, slows: float) -> float:
        """Let at most `most` seconds pass, until a copy ends; 0 where none is under way."""
        span, fronts = most, []
        for stream, queue in self._queues.items():
            if queue and (type(queue[0]) is _Under or self._settled(queue)):
                fronts.append((stream, queue))
                lasts = queue[0].left * slows  # type: ignore[union-attr]
                if lasts < span:
                    span = lasts
        if not fronts:
            return 0.0
        begin = self.clocks[COMPUTE]
        end = self.clocks[COMPUTE] = begin + span
        for stream, queue in fronts:
            front = queue[0]
            assert isinstance(front, _Under)
            if front.start < 0:
                front.start = begin
            front.left -= span / slows
            if front.left <= 1e-12:
                self.spans.append((stream, front.label, front.start, end))
                queue.popleft()
                self._settled(queue)
        return span if span > 0 else 1e-15

    def _settled(self, queue: deque[_Under | _Mark]) -> bool:
        """Pass the marks at the front; whether a copy is there then."""
        while queue and isinstance(mark := queue[0], _Mark):
            if mark.gate is not None and not mark.gate.passed:
                return False
            mark.passed = True
            queue.popleft()
        return bool(queue)


def run_virtually(
    program: Program, cost: CostOf, steps: int, inline_compute: bool = True, between_s: float = 0.0
) -> tuple[list[float], VirtualDevice]:
    """End time of each step on the compute stream, and the device with its timeline. Each step ends with `between_s`
    seconds in which nothing is launched."""
    device = VirtualThreads(cost) if inline_compute else VirtualDevice(cost)
    prologue = [c for i in program.prologue if (c := device.bind(i, None)) is not None]
    step = [c for i in program.step if (c := device.bind(i, None)) is not None]
    for call in prologue:
        call()
    ends = []
    for _ in range(steps):
        for call in step:
            call()
        device.idle(between_s)
        ends.append(device.now)
    return ends, device
