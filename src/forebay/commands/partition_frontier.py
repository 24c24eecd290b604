"""The frontier of cost (chip-seconds per token) against latency over meshes and sequences, as rows and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forebay.commands.prompts import JobError
from forebay.rewriter.ir.files import write_text
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
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws without a screen
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for phase in dict.fromkeys(p["phase"] for p in points):
        mine = [p for p in points if p["phase"] == phase]
        axis.plot([p["latency_s"] for p in mine], [p["chip_seconds_per_token"] for p in mine], marker="o", label=phase)
        for p in mine:
            axis.annotate(f"{p['mesh']}, {p['batch']}", (p["latency_s"], p["chip_seconds_per_token"]), fontsize=6,
                          textcoords="offset points", xytext=(3, 3))
    axis.set(xscale="log", yscale="log", xlabel="latency of a pass, s", ylabel="cost, chip-seconds per token")
    axis.grid(True, which="both", linewidth=0.3)
    axis.legend(title="numbers: mesh, sequences")
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise JobError(f"--pareto: cannot write the picture {path}: {error}") from error
    write_text(path.with_suffix(".json"), json.dumps(list(points), indent=1) + "\n")
