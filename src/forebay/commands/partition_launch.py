"""The commands that `forebay partition` prints to launch a layout: the best layouts that run here, and the plans of
their ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.commands.terminal import JobError

if TYPE_CHECKING:
    from forebay.rewriter.partition.choose import PartitionProblem, RunLayouts

MOST = 12  # layouts tried before none is launched


def launched(model: str, problem: PartitionProblem, ways: Sequence[RunLayouts]) -> tuple[RunLayouts | None, str]:
    """The first of `ways` that divides a folder's model, as ranks will when they open it, or the first where `model` is
    no folder; without any None and why. JobError where the model has not as many positions."""
    from forebay.rewriter.predict.model_shapes import ModelError

    if not ways:
        return None, "none of the layouts that run here fits (docs/partitioning.md)"
    if not Path(model).is_dir():
        return ways[0], ""
    try:
        refusals = []
        for way, refusal in zip(ways, _refusals(model, problem, ways[:MOST]), strict=False):
            if refusal is None:
                return way, ""
            refusals.append(refusal)
    except ModelError as error:
        return None, f"none: {error}"
    return None, f"none of the layouts that run here divides this model: {refusals[0]}"


def _refusals(model: str, problem: PartitionProblem, ways: Sequence[RunLayouts]) -> Iterator[str | None]:
    """Return why a model cannot be divided in each of `ways`; None where it can."""
    from forebay.read_mesh import read_mesh
    from forebay.rewriter.pipeline.shard_captured import shard_captured
    from forebay.rewriter.predict.model_shapes import capture_config, load_config
    from forebay.rewriter.switches import read_switches

    captured, length = capture_config(load_config(model)[1]), problem.prompt + problem.new_tokens
    if captured.max_positions and length > captured.max_positions:
        raise JobError(f"a prompt of {problem.prompt} and {problem.new_tokens} new tokens exceed the model's "
                       f"{captured.max_positions} positions; give shorter ones by --prompt and --new-tokens")
    for way in ways:
        try:
            share = read_mesh(mesh_option(problem, way))
            for rank in dict.fromkeys((0, share.ranks - 1)):
                shard_captured(captured, replace(share, rank=rank), read_switches())
            yield None
        except ValueError as error:  # ShardError, PlanError
            yield str(error)


def mesh_option(problem: PartitionProblem, runs: RunLayouts) -> str:
    """Return the value of `--mesh` for the layouts that run: the last axis divides the hidden size, and weights are
    gathered over the last ones."""
    way, chips, layout = runs.decode, problem.mesh.chips, runs.prefill.feedforward
    wide, gathered = problem.mesh.size(way.wide), problem.mesh.size(runs.prefill.gathered)
    shape = [chips // wide, wide] if layout != "xy" else [chips // gathered, gathered // wide, wide]
    parts = [f"tensor={'x'.join(map(str, shape if way.wide else [chips]))}"]
    looped = {"chunks": dict.fromkeys((runs.prefill.chunks, way.chunks)),
              "gather_chunks": dict.fromkeys((runs.prefill.gather_chunks, way.gather_chunks))}
    parts += [f"layout={layout}"] * bool(way.wide) + ["attention=batch"] * (way.attention == "batch")
    parts += [f"{name}={'/'.join(map(str, each))}" for name, each in looped.items() if list(each) != [1]]
    return ",".join(parts)


def write_plans(
    model: str, problem: PartitionProblem, runs: RunLayouts | None, why: str, machine: str, folder: Path
) -> Path:
    """The folder with the plan of each rank, for the machine and the memory that were chosen for. JobError where no
    layout runs, which says `why`, or the model is no folder."""
    from forebay.commands.options import model_folder
    from forebay.commands.plan_ranks import plans_of_ranks, save_ranks
    from forebay.open_model import open_model
    from forebay.rewriter.ir.plan import Budget, Workload
    from forebay.rewriter.machine.presets import load_machine_or_preset
    from forebay.rewriter.planning.options import Options

    if runs is None:
        raise JobError(f"--plans: {why}")
    if not Path(model).is_dir():
        raise JobError(f"--plans: {model} is no folder with a model's weights, whose places in files plans name")
    work = Workload(problem.batch, problem.prompt, problem.new_tokens)
    budget = Budget(int(problem.capacity_nbytes), 0)
    save_ranks(plans_of_ranks(open_model(model_folder(model)), mesh_option(problem, runs), budget, work, Options(),
                              load_machine_or_preset(machine)), folder)
    return folder


def launch_command(model: str, problem: PartitionProblem, runs: RunLayouts, plans: Path | None) -> str:
    """The command line of the layouts that are launched. `plans` has those of the ranks, which say how much is computed
    at once and within what memory."""
    from forebay.rewriter.ir.byte_sizes import format_nbytes, parse_nbytes

    nbytes = int(problem.capacity_nbytes)
    budget = format_nbytes(nbytes).replace(" ", "")
    if parse_nbytes(budget, "budget") != nbytes:  # rounded, it would be another
        budget = str(nbytes)
    how = f"--plan {plans}" if plans is not None else f"--batch {problem.batch} --budget device={budget}"
    folder = model if Path(model).is_dir() else problem.model.name
    return (f"torchrun --nproc-per-node={problem.mesh.chips} --no-python forebay run {folder} --prompts IN.jsonl "
            f"--output OUT.jsonl {how} --mesh {mesh_option(problem, runs)}")
