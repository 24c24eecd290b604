"""The device that executes nothing: clocks, for prediction of what runs on a GPU's streams."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from forebay.rewriter.ir.program import (
    COMPUTE,
    MOVES,
    READS,
    UPWARD,
    WRITE,
    Copy,
    Item,
    Launch,
    Program,
    Record,
    TensorRef,
    Wait,
)
from forebay.runtime.devices.device import Call


class ItemCost(NamedTuple):
    """Seconds of an item alone. A launch takes `slowed` times as long while copies run, and they take `slows` times as
    long beside it; a copy takes `latency_s` more, of which those under way before it on its stream hide their share.
    `issue_s` is what an item takes of the thread that issues it. `both_ways`: a write of a file takes the first number
    of times as long while files are read, and they the second while it is under way."""

    time_s: float
    slowed: float = 1.0
    slows: float = 1.0
    latency_s: float = 0.0
    issue_s: float = 0.0
    both_ways: tuple[float, float] = (1.0, 1.0)


CostOf = Callable[[Item], ItemCost]
TimedSpan = tuple[str, str, float, float]  # stream or lane, label, start and end in seconds
BESIDE = dict(zip(UPWARD, reversed(UPWARD), strict=True))


@dataclass
class VirtualDevice:
    """Advances a clock per stream by the cost of each item, as a GPU's streams do; what the streams do to each other
    beside events counts for the one that is issued later: reads and writes of the disk slow each other, and of two
    copies to the GPU it has what the other leaves of the link. A launch, and a copy between host and GPU, starts when
    it has been issued, at the earliest: until then it stands in its stream, and counts as busy."""

    cost: CostOf
    queues: bool = False
    loads_beside: bool = False
    issued_s: float = 0.0  # when the thread that issues launches had issued the last
    clocks: dict[str, float] = field(default_factory=dict)
    events: dict[int, float] = field(default_factory=dict)
    spans: list[TimedSpan] = field(default_factory=list)
    writing: float = 1.0  # how many times as long reads take beside the last write
    copied: dict[str, deque[tuple[float, float]]] = field(default_factory=lambda: {s: deque() for s in BESIDE})

    def allocate(self, arenas: Mapping[str, int]) -> None:
        """Nothing to allocate."""

    def hold(self, held: Mapping[str, int]) -> None:
        """Nothing: on a CPU no launch keeps any."""

    def open_files(self, files: Mapping[str, int]) -> None:
        """Nothing to open."""

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        """A tensor of the right shape without memory."""
        return torch.empty_strided(ref.shape, ref.stride, dtype=getattr(torch, ref.dtype), device="meta")

    def operand(self, stream: str, ref: TensorRef) -> torch.Tensor:
        """The same, for any stream."""
        return self.tensor(ref)

    @property
    def now(self) -> float:
        """Seconds at which all launches issued so far are done."""
        return self.clocks.get(COMPUTE, 0.0)

    def bind(self, item: Item, launch: Call | None) -> Call | None:
        clocks, events, stream = self.clocks, self.events, item.stream
        if isinstance(item, Launch | Copy):
            cost, label, note = self.cost(item), item.label, self.spans.append
            issued = isinstance(item, Launch) or stream in MOVES

            def advance() -> None:
                start = begin = clocks.get(stream, 0.0)
                if issued:
                    self.issued_s += cost.issue_s
                    begin = max(start, self.issued_s)
                time_s = self._link_time_s if stream in BESIDE else self._disk_time_s
                end = clocks[stream] = begin + time_s(stream, cost, begin)
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

    def write(self, inputs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Nothing: nothing is read."""

    def read_later(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The tensor, which holds nothing."""
        return lambda: value

    def tell(self, ref: TensorRef, value: torch.Tensor) -> None:
        """Nothing: nothing is read."""

    def joined(self, items: Sequence[tuple[Item, Call]]) -> list[Call]:
        return [call for _, call in items]

    def _disk_time_s(self, stream: str, cost: ItemCost, begin: float) -> float:
        """Seconds of an item from `begin` on: longer where it goes the other way on the disk than what is under way."""
        alone, factor, until = cost.time_s + cost.latency_s, 1.0, begin
        if stream == WRITE:
            self.writing, factor = cost.both_ways[1], cost.both_ways[0]
            until = max((self.clocks.get(other, 0.0) for other in READS), default=begin)
        elif stream in READS:
            factor, until = self.writing, self.clocks.get(WRITE, 0.0)
        together = min(alone * factor, max(0.0, until - begin))
        return together + alone - together / factor

    def _link_time_s(self, stream: str, cost: ItemCost, begin: float) -> float:
        """Seconds of a copy from `begin` on, while those on the other stream have the link when they were to."""
        others, end = self.copied[BESIDE[stream]], begin + cost.time_s
        while others and others[0][1] <= begin:
            others.popleft()
        for start, stop in others:
            if start >= end:
                break
            end += stop - max(start, begin)
        self.copied[stream].append((begin, end))
        return end + cost.latency_s - begin

    def issuing(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nothing to give back."""


def run_on_streams(
    program: Program, cost: CostOf, steps: int, between_s: float = 0.0
) -> tuple[list[float], list[TimedSpan]]:
    """Return when the first step began on the compute stream and each ended, and all spans, where launches and copies
    only join the queues of their streams. Each step ends with `between_s` seconds in which nothing is launched, once
    all that was launched is done."""
    device = VirtualDevice(cost)
    prologue = [c for i in program.prologue if (c := device.bind(i, None)) is not None]
    step = [c for i in program.step if (c := device.bind(i, None)) is not None]
    for call in prologue:
        call()
    ends = [device.now]
    for _ in range(steps):
        for call in step:
            call()
        device.issued_s = device.clocks[COMPUTE] = device.now + between_s
        ends.append(device.now)
    return ends, device.spans
