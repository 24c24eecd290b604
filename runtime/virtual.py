"""The device that executes nothing: a clock per stream, for prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from forebay.rewriter.program import COMPUTE, Copy, Item, Launch, Program, Record, TensorRef, Wait
from forebay.runtime.device import Call


@dataclass
class VirtualDevice:
    """Advances a clock per stream by the cost of each item; `spans` are (stream, label, start, end) in seconds.

    With `inline_compute` the issuing thread computes, as on a machine without a GPU: nothing is issued before the
    launches ahead of it in the list are done.
    """

    cost: Callable[[Item], float]
    inline_compute: bool = True
    clocks: dict[str, float] = field(default_factory=dict)
    events: dict[int, float] = field(default_factory=dict)
    spans: list[tuple[str, str, float, float]] = field(default_factory=list)

    def allocate(self, arenas: Mapping[str, int]) -> None:
        """Nothing to allocate."""

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        """A tensor of the right shape without memory."""
        return torch.empty_strided(ref.shape, ref.stride, dtype=getattr(torch, ref.dtype), device="meta")

    def bind(self, item: Item, launch: Call | None) -> Call | None:
        clocks, events, stream = self.clocks, self.events, item.stream
        # what is issued to another stream waits for the issuing thread, which computes
        issuer = COMPUTE if self.inline_compute else stream
        if isinstance(item, Launch | Copy):
            cost, label, note = self.cost(item), item.label, self.spans.append
            if isinstance(item, Launch):
                issuer = stream

            def advance() -> None:
                start = clocks.get(stream, 0.0)
                if issuer != stream:
                    start = max(start, clocks.get(issuer, 0.0))
                end = clocks[stream] = start + cost
                note((stream, label, start, end))

            return advance
        if isinstance(item, Record):
            event = item.event

            def record() -> None:
                events[event] = max(clocks.get(stream, 0.0), clocks.get(issuer, 0.0))

            return record
        if isinstance(item, Wait):
            event = item.event

            def wait() -> None:
                clocks[stream] = max(clocks.get(stream, 0.0), clocks.get(issuer, 0.0), events.get(event, 0.0))

            return wait
        return None

    def finish(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nothing to give back."""


def run_virtually(program: Program, cost: Callable[[Item], float], steps: int, inline_compute: bool = True
                  ) -> tuple[list[float], VirtualDevice]:
    """End time of each step on the compute stream, and the device with its timeline."""
    device = VirtualDevice(cost, inline_compute)
    prologue = [c for i in program.prologue if (c := device.bind(i, None)) is not None]
    step = [c for i in program.step if (c := device.bind(i, None)) is not None]
    for call in prologue:
        call()
    ends = []
    for _ in range(steps):
        for call in step:
            call()
        ends.append(device.clocks.get(COMPUTE, 0.0))
    return ends, device
