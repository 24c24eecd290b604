"""Predict a step by running its Program on the virtual device with a machine's costs."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.rewriter.costs import item_time_s
from forebay.rewriter.machine import Machine
from forebay.rewriter.program import COMPUTE, Copy, Item, Launch, Program, TensorRef
from forebay.runtime.virtual import run_virtually

STEPS = 3  # the third step starts as every later one does


@dataclass(frozen=True)
class Timeline:
    """One predicted steady step: `time_s`, busy seconds per stream, and its spans (stream, label, start, end)."""

    time_s: float
    busy_time_s: dict[str, float]
    bottleneck: str
    spans: tuple[tuple[str, str, float, float], ...]


def simulate(program: Program, machine: Machine) -> Timeline:
    """The steady-state step of `program` on `machine`, in seconds."""
    known: dict[tuple, float] = {}  # equal layers cost the same

    def cost(item: Item) -> float:
        key = _likeness(item)
        found = known.get(key)
        if found is None:
            found = known[key] = item_time_s(item, machine)
        return found

    ends, device = run_virtually(program, cost, STEPS, inline_compute=machine.device_kind == "cpu")
    start, end = ends[-2], ends[-1]
    spans = tuple((s, label, a - start, b - start) for s, label, a, b in device.spans if start <= a < end)
    busy: dict[str, float] = {}
    for stream, _, a, b in spans:
        busy[stream] = busy.get(stream, 0.0) + b - a
    bottleneck = max(busy, key=lambda s: busy[s]) if busy else COMPUTE
    return Timeline(end - start, busy, bottleneck, spans)


def _likeness(item: Item) -> tuple:
    """Items of equal likeness take equal time."""
    if isinstance(item, Launch):
        shapes = tuple([(ref.dtype, ref.shape) for ref in item.args if type(ref) is TensorRef])
        return item.op, item.impl, shapes, item.kwargs.get("form"), sum([s.nbytes for s in item.reads]), sum(
            [s.nbytes for s in item.writes])
    if isinstance(item, Copy):
        src = item.src
        return type(src), getattr(src, "arena", ""), getattr(src, "nbytes", id(item)), item.dst.arena, item.dst.nbytes
    return ()
