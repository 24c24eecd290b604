"""Forced schedules beside the planner's, each beside its prediction: the sweeps of `benchmarks.offload`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.forked import Forked
from benchmarks.offload_contestants import RATES, around

SWEEPING = ("forebay", "link")  # the processes of a sweep
PLANNERS = "the planner's"
SWEPT_SIZES = (2, 4, 8, 16, 32, 64)  # of forced micro-batches
SWEPT_SLOTS, SWEPT_MIB = (2, 4, 8), (1, 2, 4, 8)
FINALISTS = 3
WITHIN = 0.15  # of what was measured

Row = dict[str, Any]


def forced_blocks(batch: int) -> dict[str, Row]:
    """Blocks to force by name: sizes of micro-batches, staging slots of the cache, sizes of those of weights (as many
    as a layer needs), and both orders."""
    counts = sorted({-(-batch // size) for size in SWEPT_SIZES if size <= batch})
    found = {f"{n} micro-batches, {staged} slots, weights' of {mib} MiB":
             {"micro_batches": n, "cache_slots": staged, "slot_nbytes": mib << 20}
             for n in counts for staged in (2, 3) for mib in (1, 2, 4)}
    return found | {f"{n} micro-batches, row": {"micro_batches": n, "order": "row"} for n in counts}


def forced_slots(batch: int) -> dict[str, Row]:
    """Staging slots of weights to force by name, their size and the lead of reads."""
    return {f"{slots} x {mib} MiB, lead {lead}": {"slots": slots, "slot_nbytes": mib << 20, "lead": lead}
            for slots, mib in itertools.product(SWEPT_SLOTS, SWEPT_MIB) for lead in sorted({slots, slots // 2})}


def sweep(title: str, order: Row, forced: Mapping[str, Row], processes: Mapping[str, Forked], rounds: int) -> Row:
    """Forced schedules beside the planner's, which all take turns; then the best few again, from nothing, because the
    best of many noisy figures is too good to be true. They are compared by what the planner minimises, prompt and
    answer together. How far one is from the planner's is the median over the rounds of their ratio within a round.
    Around each turn plain reads and products are timed, with whose rates a step and the middle chunk of a prompt are
    predicted."""
    ours, link = (processes[name] for name in SWEEPING)
    for process in (link, ours):
        process.ask("load", **order)
    if not Path(order["machine"]).exists():
        link.ask("machine", **order)
    plans = {PLANNERS: ours.ask("plan", **order, label=PLANNERS)}
    for label, options in forced.items():
        found = ours.ask("plan", **order, label=label, forced=options)
        if "refused" not in found:  # it does not fit the budget
            plans[label] = found
    print(f"{title}: the planner takes {plans[PLANNERS]}; {len(plans) - 1} forced", file=sys.stderr, flush=True)
    turns = in_turns((ours, link), order, list(plans), rounds)
    times = answer_times(turns, order["new"])
    ranked = sorted(times, key=lambda label: to_planner(times, label))
    finalists = list(dict.fromkeys((PLANNERS, *ranked[:FINALISTS])))
    again = answer_times(in_turns((ours, link), order, finalists, 2 * rounds), order["new"])
    errors = {label: errors_of(turns[label]) for label in ranked}
    for label in ranked:
        shown = ", ".join(f"{phase} {100 * error:+.0f} %" for phase, error in errors[label].items())
        print(f"  {label:44} measured {median(times[label]):7.2f} s, {to_planner(times, label):.3f} x; predicted "
              f"{shown}")
    every = [error for of_one in errors.values() for error in of_one.values()]
    print(f"predicted within 15 %: {sum(abs(error) <= WITHIN for error in every)} of {len(every)}")
    above = 1 / min(to_planner(again, label) for label in again) - 1
    print(f"{title}: the planner's is {100 * above:.1f} % above the best of {len(plans) - 1} forced ones", flush=True)
    return {"model": title, "plans": plans, "turns": turns, "again_s": again, "errors": errors,
            "planner_above_best": above}


def in_turns(processes: tuple[Forked, Forked], order: Row, labels: list[str], rounds: int) -> dict[str, list[Row]]:
    """What each schedule's turn found in each round, with the rates of plain reads and products around it."""
    ours, link = processes
    turns: dict[str, list[Row]] = {label: [] for label in labels}
    before = link.ask("turn", **order)
    for _ in range(rounds):
        for label in labels:
            turn = ours.ask("turn", **order, label=label)
            after = link.ask("turn", **order)
            rates, before = around(before, after), after
            given = {rate: rates[rate] for rate in RATES}
            turns[label].append(turn | ours.ask("predicted", **order, **given) | given)
    return turns


def answer_times(turns: Mapping[str, list[Row]], new: int) -> dict[str, list[float]]:
    """Seconds that each takes for a prompt and `new` tokens, by its steps and its chunk of each round."""
    return {label: [turn["prefill_s"] + (new - 1) * median(turn["steps_s"]) for turn in found]
            for label, found in turns.items()}


def errors_of(turns: list[Row]) -> dict[str, float]:
    """How far the predictions of a schedule's turns are from what they took: the median, as a share of that."""
    found = {"step": median(t["predicted_step_s"] / median(t["steps_s"]) - 1 for t in turns)}
    if all("prefill_s" in turn for turn in turns):
        found["prefill"] = median(t["predicted_prefill_s"] / t["prefill_s"] - 1 for t in turns)
    return found


def to_planner(times: Mapping[str, list[float]], label: str) -> float:
    return median(a / b for a, b in zip(times[label], times[PLANNERS], strict=True))
