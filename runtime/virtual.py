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
        if isinstance(item, Launch | Copy):
            return lambda: self._advance(item)
        if isinstance(item, Record):
            return lambda: self.events.__setitem__(item.event, self._now(item.stream))
        if isinstance(item, Wait):
            return lambda: self.clocks.__setitem__(
                item.stream, max(self._now(item.stream), self.events.get(item.event, 0.0)))
        return None

    def _now(self, stream: str) -> float:
        now = self.clocks.get(stream, 0.0)
        return max(now, self.clocks.get(COMPUTE, 0.0)) if self.inline_compute and stream != COMPUTE else now

    def _advance(self, item: Launch | Copy) -> None:
        start = self.clocks.get(item.stream, 0.0)
        if isinstance(item, Copy):
            start = self._now(item.stream)
        end = start + self.cost(item)
        self.clocks[item.stream] = end
        self.spans.append((item.stream, item.label, start, end))

    def finish(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nothing to give back."""


def run_virtually(program: Program, cost: Callable[[Item], float], steps: int, inline_compute: bool = True
                  ) -> tuple[list[float], VirtualDevice]:
    """End time of each step on the compute stream, and the device with its timeline."""
    known: dict[int, float] = {}

    def cost_once(item: Item) -> float:
        found = known.get(id(item))
        if found is None:
            found = known[id(item)] = cost(item)
        return found

    device = VirtualDevice(cost_once, inline_compute)
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
