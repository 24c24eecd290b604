"""Forced blocks beside the planner's, and each beside its prediction: `python -m benchmarks.throughput --sweep`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.block_contestants import RATES, around
from benchmarks.disk_offload import note
from benchmarks.forked import Forked
from benchmarks.throughput_cells import Cell

SWEEPING = ("forebay", "link")  # the processes of a sweep
PLANNERS = "the planner's"
SWEPT_SIZES = (2, 4, 8, 16, 32, 64)  # of forced micro-batches
FINALISTS = 3
WITHIN = 0.15  # of what was measured

Row = dict[str, Any]


def sweep(family: str, cell: Cell, given: Row, processes: Mapping[str, Forked], rounds: int) -> Row:
    """Forced blocks beside the planner's, which all take turns; then the best few again, from nothing, because the best
    of many noisy figures is too good to be true. Blocks are compared by what the planner minimises, prompt and answer
    together. How far one is from the planner's is the median over the rounds of their ratio within a round. Around each
    turn plain reads and products are timed, with whose rates a step and the middle chunk of a prompt are predicted."""
    order: Row = given | {"ram": False, "whole": False, "cache_format": "native", "order": "zigzag", "once": True,
                          "batch": cell.batch, "prompt": cell.prompt, "new": cell.new, "rows": min(cell.batch, 64)}
    ours, link = (processes[name] for name in SWEEPING)
    link.ask("load", **order)
    ours.ask("load", **order)
    if not Path(order["machine"]).exists():
        note("measuring the machine")
        link.ask("machine", **order)
    plans = {PLANNERS: ours.ask("plan", **order, label=PLANNERS)}
    for label, forced in forced_blocks(cell.batch).items():
        found = ours.ask("plan", **order, label=label, forced=forced)
        if "refused" not in found:
            plans[label] = found
    note(f"{family}, {cell.name}: the planner takes {plans[PLANNERS]}; {len(plans) - 1} forced blocks")
    turns = in_turns((ours, link), order, list(plans), rounds)
    times = answer_times(turns, cell)
    ranked = sorted(times, key=lambda label: to_planner(times, label))
    finalists = list(dict.fromkeys((PLANNERS, *ranked[:FINALISTS])))
    again = answer_times(in_turns((ours, link), order, finalists, 2 * rounds), cell)
    errors = {label: errors_of(turns[label]) for label in ranked}
    for label in ranked:
        shown = ", ".join(f"{phase} {100 * error:+.0f} %" for phase, error in errors[label].items())
        print(f"  {label:44} measured {median(times[label]):7.2f} s, {to_planner(times, label):.3f} x; predicted "
              f"{shown}")
    found = [error for of_block in errors.values() for error in of_block.values()]
    print(f"predicted within 15 %: {sum(abs(error) <= WITHIN for error in found)} of {len(found)}")
    above = 1 / min(to_planner(again, label) for label in again) - 1
    print(f"{family}, {cell.name}: the planner's block is {100 * above:.1f} % above the best of "
          f"{len(plans) - 1} forced ones", flush=True)
    return {"model": family, "cell": cell.name, "plans": plans, "turns": turns, "again_s": again, "errors": errors,
            "planner_above_best": above}


def forced_blocks(batch: int) -> dict[str, Row]:
    """Blocks to force by name: sizes of micro-batches, staging slots of the cache, sizes of those of weights (as many
    as a layer needs), and both orders."""
    counts = sorted({-(-batch // size) for size in SWEPT_SIZES if size <= batch})
    found = {f"{n} micro-batches, {staged} slots, weights' of {mib} MiB":
             {"micro_batches": n, "cache_slots": staged, "slot_nbytes": mib << 20}
             for n in counts for staged in (2, 3) for mib in (1, 2, 4)}
    return found | {f"{n} micro-batches, row": {"micro_batches": n, "order": "row"} for n in counts}


def in_turns(processes: tuple[Forked, Forked], order: Row, labels: list[str], rounds: int) -> dict[str, list[Row]]:
    """What each block's turn found in each round, with the rates of plain reads and products around it."""
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


def answer_times(turns: dict[str, list[Row]], cell: Cell) -> dict[str, list[float]]:
    """Seconds that each block takes for prompt and answer, by its steps and its chunk of each round."""
    return {label: [turn["prefill_s"] + (cell.new - 1) * median(turn["steps_s"]) for turn in found]
            for label, found in turns.items()}


def errors_of(turns: list[Row]) -> dict[str, float]:
    """How far the predictions of a block's turns are from what they took: the median, as a share of that."""
    found = {"step": median(t["predicted_step_s"] / median(t["steps_s"]) - 1 for t in turns)}
    if all("prefill_s" in turn for turn in turns):
        found["prefill"] = median(t["predicted_prefill_s"] / t["prefill_s"] - 1 for t in turns)
    return found


def to_planner(times: dict[str, list[float]], label: str) -> float:
    return median(a / b for a, b in zip(times[label], times[PLANNERS], strict=True))
