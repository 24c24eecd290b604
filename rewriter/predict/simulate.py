"""Predict a step by running its Program on the virtual device with a machine's costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from forebay.rewriter.ir.program import (
    COMPUTE,
    UNORDERED,
    WRITE,
    Copy,
    Item,
    Launch,
    Program,
    Rows,
    TensorRef,
    copy_nbytes,
    tier_of,
)
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.predict.estimator import Estimator, MachineEstimator
from forebay.rewriter.predict.item_costs import (
    copy_latency_s,
    host_read_nbytes,
    item_time_s,
    launch_issue_s,
    slices_of,
    taken_nbytes,
    touched_nbytes,
)
from forebay.rewriter.predict.missed_experts import by_missed_experts
from forebay.runtime.devices.virtual import ItemCost, run_on_streams
from forebay.runtime.devices.virtual_threads import run_on_threads

STEPS = 3  # the third step starts as every later one does
CORES = "cores"  # what binds a step whose launches and copies together ask for all of their time


@dataclass(frozen=True)
class Timeline:
    """One predicted steady step: `time_s`, busy seconds per stream, and its spans (stream, label, start, end):
    all that end in it, so that a copy for it may begin before 0."""

    time_s: float
    busy_time_s: dict[str, float]
    bottleneck: str
    spans: tuple[tuple[str, str, float, float], ...]


def simulate(program: Program, machine: Machine, steps: int = STEPS, times: Estimator | None = None) -> Timeline:
    """The last of so many steps of `program` on `machine`, in seconds: with the default the steady state, with 1 the
    first step, which finds only the prologue issued. `times` stand in the place of the machine's own. Times of steps
    that read experts by name are means over `by_missed_experts`, of which the spans are one in the middle."""
    times = times or MachineEstimator(machine)
    lines = [_run(each, steps, times) for each in by_missed_experts(program)]
    if len(lines) == 1:
        return lines[0]
    busy = {stream: fmean(line.busy_time_s.get(stream, 0.0) for line in lines)
            for stream in dict.fromkeys(stream for line in lines for stream in line.busy_time_s)}
    middle = lines[len(lines) // 2]
    bottleneck = CORES if middle.bottleneck == CORES else max(busy, key=lambda s: busy[s])
    return Timeline(fmean(line.time_s for line in lines), busy, bottleneck, middle.spans)


def _run(program: Program, steps: int, times: Estimator) -> Timeline:
    known: dict[tuple, ItemCost] = {}  # equal layers cost the same

    def cost(item: Item) -> ItemCost:
        key = _likeness(item)
        found = known.get(key)
        if found is None:
            found = known[key] = item_cost(item, times, program.seen)
        return found

    between = choice_time_s(program, times)
    ends, ran, least = run_on_threads(program, cost, steps, between, times.reads_core_share) if times.serial else (
        *run_on_streams(program, cost, steps, between), 0.0)
    start, end = ends[-2:]
    spans = tuple((s, label, a - start, b - start) for s, label, a, b in ran if start < b <= end)
    busy: dict[str, float] = {}
    for stream, _, a, b in spans:
        busy[stream] = busy.get(stream, 0.0) + b - a
    bottleneck = max(busy, key=lambda s: busy[s]) if busy else COMPUTE
    if not busy.keys().isdisjoint(UNORDERED) and end - start <= least * (1 + 1e-9):
        bottleneck = CORES
    return Timeline(end - start, busy, bottleneck, spans)


def item_cost(item: Item, times: Estimator, seen: Mapping[int, float] | None = None) -> ItemCost:
    """Return an item's cost on the virtual device, alone and next to others; `seen` as of a Program."""
    time_s = item_time_s(item, times, seen)
    if isinstance(item, Launch):
        share = times.memory_share(touched_nbytes(item), time_s)
        return ItemCost(time_s, times.slowed(share), times.slows(share), issue_s=launch_issue_s(times))
    if isinstance(item, Copy):
        both_ways = times.both_ways(copy_nbytes(item)) if item.stream == WRITE and copy_nbytes(item) else (1.0, 1.0)
        issue_s = times.copy_issue_s + (slices_of(item) - 1) * times.slice_issue_s
        return ItemCost(time_s, latency_s=copy_latency_s(item, times), issue_s=issue_s, both_ways=both_ways)
    return ItemCost(time_s)


def choice_time_s(program: Program, times: Estimator) -> float:
    """Seconds between two steps: the tokens are chosen from the logits [B, V], while reads go on."""
    return times.choice_s(math.prod(program.outputs["out0"].shape)) if "out0" in program.outputs else 0.0


def _likeness(item: Item) -> tuple:
    """Items of equal likeness take equal time."""
    if isinstance(item, Launch):
        shapes = tuple([(ref.dtype, ref.shape) for ref in item.args if type(ref) is TensorRef])
        how = item.kwargs.get("form"), item.kwargs.get("count"), item.kwargs.get("share")
        return (item.stream, item.op, item.impl, shapes, how, sum([s.nbytes for s in item.reads]),
                sum([s.nbytes for s in item.writes]), host_read_nbytes(item))
    if isinstance(item, Copy):
        rows = [(end.row_nbytes, type(end.table), end.typical) if isinstance(end, Rows) else None
                for end in (item.src, item.dst)]
        return tier_of(item.src), tier_of(item.dst), copy_nbytes(item), taken_nbytes(item), slices_of(item), *rows
    return ()
