"""The frontier of cost (chip-seconds per token) against latency over meshes and sequences, as rows and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forebay.commands.curves import draw_curves
from forebay.commands.terminal import JobError
from forebay.rewriter.partition.choose import PartitionError, PartitionProblem, choose


def frontier_of(problems: Sequence[PartitionProblem], batches: Sequence[int]) -> list[dict[str, Any]]:
    """For each phase what nothing beats both in latency and in cost, quickest first; what does not fit is left out."""
    points: dict[str, list[dict[str, Any]]] = {}
    for problem in problems:
        for batch in batches:
            try:
                found = choose(replace(problem, batch=batch))
            except PartitionError:
                continue
            for phase, seconds in found.phase_s.items():
                tokens = batch * (problem.prompt if phase == "prefill" else 1)
                points.setdefault(phase, []).append({
                    "phase": phase, "mesh": problem.mesh.name, "batch": batch, "latency_s": seconds,
                    "chip_seconds_per_token": problem.mesh.chips * seconds / tokens})
    best: list[dict[str, Any]] = []
    for mine in points.values():
        least = float("inf")
        for point in sorted(mine, key=lambda p: (p["latency_s"], p["chip_seconds_per_token"])):
            if point["chip_seconds_per_token"] < least:
                least = point["chip_seconds_per_token"]
                best.append(point)
    return best


def draw_cost(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Cost against latency, both logarithmic, a curve per phase (Pope et al.'s Figure 1), and JSON beside it.

    Raises JobError for a path whose ending matplotlib cannot write.
    """
    curves: dict[str, list[tuple[float, float, str]]] = {}
    for p in points:
        curves.setdefault(p["phase"], []).append(
            (p["latency_s"], p["chip_seconds_per_token"], f"{p['mesh']}, {p['batch']}"))
    try:
        draw_curves(curves, ("latency of a pass, s", "cost, chip-seconds per token"), "mesh, sequences", path, points)
    except ValueError as error:
        raise JobError(f"--pareto: {error}") from error
