"""Forced blocks beside the planner's: `python -m benchmarks.throughput --sweep`."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.disk_offload import Process, note
from benchmarks.throughput_cells import MODULE, Cell

PLANNERS = "the planner's"
SWEPT_SIZES = (2, 4, 8, 16, 32, 64)  # of forced micro-batches
FINALISTS = 3

Row = dict[str, Any]


def sweep(family: str, cell: Cell, given: Row, threads: int, rounds: int) -> Row:
    """Forced blocks beside the planner's, which all take turns; then the best few again, from nothing, because the
    best of many noisy figures is too good to be true. How far a block is from the planner's is the median over the
    rounds of their ratio within a round."""
    order: Row = given | {"ram": False, "whole": False, "prefill": False, "cache_format": "native", "order": "zigzag",
                          "once": True, "batch": cell.batch, "prompt": cell.prompt, "new": cell.new}
    ours = Process("forebay", threads, MODULE)
    try:
        ours.ask("load", **order)
        plans = {PLANNERS: ours.ask("plan", **order, label=PLANNERS)}
        for label, forced in forced_blocks(cell.batch).items():
            found = ours.ask("plan", **order, label=label, forced=forced)
            if "refused" not in found:
                plans[label] = found
        note(f"{family}, {cell.name}: the planner takes {plans[PLANNERS]}; {len(plans) - 1} forced blocks")
        times = in_turns(ours, order, list(plans), rounds)
        ranked = sorted(times, key=lambda label: to_planner(times, label))
        again = in_turns(ours, order, list(dict.fromkeys((PLANNERS, *ranked[:FINALISTS]))), 3 * rounds)
    finally:
        ours.close()
    for label in ranked:
        print(f"  {label:44} predicted {plans[label]['predicted_step_s']:7.3f} s, measured "
              f"{median(times[label]):7.3f} s, {to_planner(times, label):.3f} x")
    above = 1 / min(to_planner(again, label) for label in again) - 1
    print(f"{family}, {cell.name}: the planner's block is {100 * above:.1f} % above the best of "
          f"{len(plans) - 1} forced ones", flush=True)
    return {"model": family, "cell": cell.name, "plans": plans, "times_s": times, "again_s": again,
            "planner_above_best": above}


def forced_blocks(batch: int) -> dict[str, Row]:
    """Blocks to force by name: sizes of micro-batches, staging slots of the cache and of weights, and both orders."""
    counts = sorted({-(-batch // size) for size in SWEPT_SIZES if size <= batch})
    found = {f"{n} micro-batches, {staged} + {slots} slots": {"micro_batches": n, "cache_slots": staged, "slots": slots}
             for n in counts for staged in (2, 3) for slots in (2, 4, 8)}
    return found | {f"{n} micro-batches, row": {"micro_batches": n, "order": "row"} for n in counts}


def in_turns(ours: Process, order: Row, labels: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of each block's step in each round."""
    times: dict[str, list[float]] = {label: [] for label in labels}
    for _ in range(rounds):
        for label in labels:
            times[label].append(median(ours.ask("turn", **order, label=label)["steps_s"]))
    return times


def to_planner(times: dict[str, list[float]], label: str) -> float:
    return median(a / b for a, b in zip(times[label], times[PLANNERS], strict=True))
