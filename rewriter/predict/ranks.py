"""Predict a step of several ranks: their Programs side by side on virtual devices, waiting for each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from forebay.rewriter.ir.program import COLLECT, COMPUTE, READS, Item, Launch, Program
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.predict.estimator import Estimator, MachineEstimator
from forebay.rewriter.predict.item_costs import touched_nbytes
from forebay.rewriter.predict.simulate import STEPS, choice_time_s, item_cost
from forebay.runtime.devices.virtual import ItemCost, TimedSpan
from forebay.runtime.devices.virtual_ranks import run_ranks

ROUNDS = 4  # of finding out how long ranks are busy beside each other, which depends on how much slower they are then
SETTLED = 0.01


@dataclass(frozen=True)
class RankLine:
    """A rank's predicted steady step: seconds of it, those in which it computes, those of its exchanges once all are
    there, and those in which its thread waits for one, others' delay with it."""

    time_s: float
    compute_s: float
    exchange_s: float
    waiting_s: float


@dataclass(frozen=True)
class BusyBeside:
    """Shares (0..1) of a rank's computing time, and of its reading time, in which other ranks do the same."""

    computing: float = 0.0
    reading: float = 0.0


def beside_readers(machine: Machine, ranks: int) -> Machine:
    """`machine` as one of so many ranks of it finds it, all of which read its disk: what a rank by itself is planned
    and predicted for. Where nothing was measured of that, as it is."""
    slowed = machine.mesh.reads_slowed_among(ranks)
    links = tuple(replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / slowed) if link.src == "disk"
                  else link for link in machine.links)
    return replace(machine, links=links, mesh=replace(machine.mesh, reads_slowed=1.0))


def simulate_ranks(programs: Sequence[Program], machine: Machine, *, steps: int = STEPS) -> tuple[RankLine, ...]:
    """The last of so many steps of each rank, all of one machine like `machine`, whose memory and disk they share while
    they compute and read at the same time."""
    times = MachineEstimator(machine)
    between = [choice_time_s(program, times) for program in programs]
    beside = [BusyBeside() for _ in programs]
    for _ in range(ROUNDS):
        costs = [_costs(program, times, own) for program, own in zip(programs, beside, strict=True)]
        ran = run_ranks(programs, costs, steps, between, times.overlap_penalty)
        before, beside = beside, _busy_beside(ran)
        if all(abs(a.computing - b.computing) < SETTLED and abs(a.reading - b.reading) < SETTLED
               for a, b in zip(before, beside, strict=True)):
            break
    found = []
    for program, cost, (ends, spans) in zip(programs, costs, ran, strict=True):
        start, end = ends[-2:]
        busy = {stream: sum(b - a for s, _, a, b in spans if s == stream and start < b <= end)
                for stream in (COMPUTE, COLLECT)}
        exchanges = [item for item in program.step if type(item) is Launch and item.stream == COLLECT]
        found.append(RankLine(end - start, busy[COMPUTE], sum(cost(item).time_s for item in exchanges), busy[COLLECT]))
    return tuple(found)


def _busy_beside(ran: Sequence[tuple[list[float], list[TimedSpan]]]) -> list[BusyBeside]:
    """Return how much of the last step's time ranks were busy beside each other."""
    shares: list[list[float]] = []
    for streams in ((COMPUTE,), READS):
        busy = [_joined([(max(a, ends[-2]), b) for s, _, a, b in spans if s in streams and b > ends[-2]])
                for ends, spans in ran]
        shares.append([fmean([_both_s(own, other) for other in busy if other is not own] or [0.0])
                       / (sum(b - a for a, b in own) or 1.0) for own in busy])
    return [BusyBeside(*pair) for pair in zip(*shares, strict=True)]


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans in order, those that meet put together."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _both_s(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    """Seconds in spans of both."""
    found, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        found += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def _costs(program: Program, times: Estimator, beside: BusyBeside) -> Callable[[Item], ItemCost]:
    known: dict[int, ItemCost] = {}

    def cost(item: Item) -> ItemCost:
        found = known.get(id(item))
        if found is None:
            found = item_cost(item, times, program.seen)
            slowed, share = 1.0, 0.0
            if type(item) is Launch and item.stream == COMPUTE:
                slowed = times.beside_ranks(times.memory_share(touched_nbytes(item), found.time_s))
                share = beside.computing
            elif item.stream in READS:
                slowed, share = times.reads_beside_ranks, beside.reading
            found = known[id(item)] = found._replace(time_s=found.time_s * (1 + share * (slowed - 1)))
        return found

    return cost
