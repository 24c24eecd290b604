"""The plans of all ranks of a mesh, made by one process: files of a folder, and one of them shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.commands.terminal import doing

if TYPE_CHECKING:
    from forebay.rewriter.ir.graph import CapturedModel
    from forebay.rewriter.ir.plan import Budget, Plan, Workload
    from forebay.rewriter.machine.profile import Machine
    from forebay.rewriter.pipeline.step_pipeline import Pipeline
    from forebay.rewriter.planning.options import Options

Ranks = list[tuple["CapturedModel", "Pipeline", "Plan"]]


def plans_of_ranks(
    opened: tuple[Any, Any, Any], mesh: str, budget: Budget, workload: Workload, options: Options, machine: Machine
) -> Ranks:
    """Each rank's part of an opened model and its plan, with the pipeline of its Programs. PlanError where one has
    none."""
    from forebay.read_mesh import read_mesh
    from forebay.rewriter.pipeline.plan_ranks import plan_together, rank_planners

    captured, checkpoint, files = opened
    with doing("planning all ranks"):
        ranks = rank_planners(captured, checkpoint.fingerprint, files, read_mesh(mesh), budget, workload, options,
                              machine)
        planned = plan_together([planner for _, planner in ranks])
    return [(part, *each) for (part, _), each in zip(ranks, planned, strict=True)]


def rank_path(folder: Path, rank: int) -> Path:
    """The file of a rank's plan."""
    return folder / f"rank{rank}.json"


def save_ranks(ranks: Ranks, folder: Path) -> None:
    """Write a plan for each rank. PlanError where the folder cannot be made, or has plans of more ranks."""
    from forebay.rewriter.ir.plan import PlanError

    if rank_path(folder, len(ranks)).exists():
        raise PlanError(f"{folder} has the plans of more than {len(ranks)} ranks; name another folder")
    make_folder(folder)
    for rank, (_, _, plan) in enumerate(ranks):
        plan.save(rank_path(folder, rank))


def make_folder(folder: Path) -> None:
    """Make a folder for plans, if it is not there; PlanError where that fails."""
    from forebay.rewriter.ir.plan import PlanError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"{folder}: {error.strerror}; plans of ranks are files of a folder") from error


def step_lines(ranks: Ranks, machine: Machine) -> list[str]:
    """Format the time of a decode step of all ranks, a line for each."""
    from forebay.rewriter.predict.ranks import simulate_ranks

    programs = [pipeline.program(plan, 1) for _, pipeline, plan in ranks]
    lines = simulate_ranks(programs, machine)
    return [f"rank {rank:<7}decode step {1e3 * line.time_s:.4g} ms beside the others: computes for "
            f"{1e3 * line.compute_s:.4g} ms, exchanges for {1e3 * line.exchange_s:.4g} ms, waits for "
            f"{1e3 * line.waiting_s:.4g} ms" for rank, line in enumerate(lines)]
