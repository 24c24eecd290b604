"""Predict a step of several ranks: their Programs side by side on virtual devices, waiting for each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.rewriter.ir.program import COLLECT, COMPUTE, READS, Item, Launch, Program
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.predict.estimator import Estimator, MachineEstimator
from forebay.rewriter.predict.item_costs import touched_nbytes
from forebay.rewriter.predict.simulate import STEPS, choice_time_s, item_cost
from forebay.runtime.devices.virtual import ItemCost
from forebay.runtime.devices.virtual_ranks import run_ranks


@dataclass(frozen=True)
class RankLine:
    """A rank's predicted steady step: seconds of it, those in which it computes, those of its exchanges once all are
    there, and those in which its thread waits for one, others' delay with it."""

    time_s: float
    compute_s: float
    exchange_s: float
    waiting_s: float


def simulate_ranks(
    programs: Sequence[Program], machine: Machine, *, at_once: bool, steps: int = STEPS, times: Estimator | None = None
) -> tuple[RankLine, ...]:
    """The last of so many steps of each rank, all on machines like `machine`. `at_once`: whether ranks of one machine
    compute and read at the same time and share its memory and disk, as those of one stage do; one after the other,
    each has them alone."""
    times = times or MachineEstimator(machine)
    costs = [_costs(program, times, at_once) for program in programs]
    ran = run_ranks(programs, costs, steps, [choice_time_s(program, times) for program in programs],
                    times.held_up if at_once else 0.0)
    found = []
    for program, cost, (ends, spans) in zip(programs, costs, ran, strict=True):
        start, end = ends[-2:]
        busy = {stream: sum(b - a for s, _, a, b in spans if s == stream and start < b <= end)
                for stream in (COMPUTE, COLLECT)}
        exchanges = [item for item in program.step if type(item) is Launch and item.stream == COLLECT]
        found.append(RankLine(end - start, busy[COMPUTE], sum(cost(item).time_s for item in exchanges), busy[COLLECT]))
    return tuple(found)


def _costs(program: Program, times: Estimator, at_once: bool) -> Callable[[Item], ItemCost]:
    known: dict[int, ItemCost] = {}

    def cost(item: Item) -> ItemCost:
        found = known.get(id(item))
        if found is None:
            found = item_cost(item, times, program.seen)
            if at_once and type(item) is Launch and item.stream == COMPUTE:
                share = times.memory_share(touched_nbytes(item), found.time_s)
                found = found._replace(time_s=found.time_s * times.beside_ranks(share))
            elif at_once and item.stream in READS:
                found = found._replace(time_s=found.time_s * times.reads_beside_ranks)
            known[id(item)] = found
        return found

    return cost
