"""`forebay partition`: layouts of a model over several chips, predicted, and what to launch; no weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.commands.options import DebugOption, require_writable
from forebay.commands.terminal import clean_errors

if TYPE_CHECKING:
    from forebay.rewriter.partition.choose import Choice, PartitionProblem, RunLayouts
    from forebay.rewriter.partition.layouts import ChipLayout

SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # sequences of the frontier


def partition(
    model: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A preset model such as llama-3-70b or palm-540b, "
                                         "or a config.json.")],
    mesh: Annotated[list[str], typer.Option(metavar="AxBxC", help="Chips along each axis, e.g. 4x4x4 or 8; several for "
                                            "the frontier, the first is what is chosen for.")],
    machine: Annotated[str, typer.Option(metavar="NAME|FILE", help="What a chip is: a preset or a profile.")]
    = "tpu-v4",
    links: Annotated[str | None, typer.Option(metavar="GB/S,…", help="What a chip sends and receives along each axis "
                                              "(default: the machine's interconnect).")] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Of one chip (default: the machine's).")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 64,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 2048,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    weights: Annotated[str, typer.Option(metavar="FORMAT", help="bfloat16, int8 (whose products are bfloat16), "
                                        "float16 or float32.")] = "bfloat16",
    parallel: Annotated[bool | None, typer.Option("--parallel/--serial", help="Attention and feed-forward side by "
                                                  "side, or not (default: as the model has them).")] = None,
    pareto: Annotated[Path | None, typer.Option(metavar="OUT.png", help="Draw the frontier, with JSON beside it.")]
    = None,
    plans: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write the plan of each rank of what is launched "
                                               "there; the model is then a folder with weights; headers are read.")]
    = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: DebugOption = False,
) -> None:
    """Choose how a model lies on several chips, for prefill and decode, and show cost against latency; predicted."""
    with clean_errors(debug):
        from forebay.commands.partition_frontier import draw_cost, frontier_of
        from forebay.commands.prompts import JobError

        require_writable(pareto, "--pareto")
        try:
            problems = [_problem(model, text, machine, links, memory, weights, parallel, (batch, prompt, new_tokens))
                        for text in mesh]
            from forebay.rewriter.partition.choose import best_run, choose

            found, runs = choose(problems[0]), best_run(problems[0])
            points = frontier_of(problems, sorted({*SWEEP, batch}))
        except ValueError as error:  # MeshError, ModelError, PartitionError, PresetError: all name what to change
            raise JobError(str(error)) from error
        if pareto is not None:
            draw_cost(points, pareto)
        written = None if plans is None else _write_plans(model, problems[0], runs, machine, plans)
        data = _data(problems[0], found) | _launch(model, problems[0], runs, written) | {"frontier": points}
        print(json.dumps(data, indent=1) if as_json else _text(data))


def _problem(model: str, mesh: str, machine: str, links: str | None, memory: str | None, weights: str,
             parallel: bool | None, sizes: tuple[int, int, int]) -> PartitionProblem:
    from forebay.rewriter.ir.byte_sizes import parse_nbytes
    from forebay.rewriter.machine.presets import load_machine_or_preset
    from forebay.rewriter.partition.choose import PartitionProblem
    from forebay.rewriter.partition.collectives import MeshError, mesh_of
    from forebay.rewriter.partition.layouts import STORED
    from forebay.rewriter.partition.published_models import PUBLISHED_SHAPES
    from forebay.rewriter.predict.estimator import MachineEstimator
    from forebay.rewriter.predict.model_shapes import ModelError, load_config, load_model_shape

    if weights not in STORED:
        raise ModelError(f"--weights {weights}: take one of {', '.join(STORED)}")
    parts = mesh.lower().split("x")
    if not all(part.isascii() and part.isdigit() and len(part) < 7 for part in parts):
        raise MeshError(f"--mesh {mesh}: chips along each axis, joined by x, e.g. 4x4x4 or 8")
    try:
        rates = tuple(1e9 * float(part) for part in links.split(",")) if links else ()
    except ValueError as error:
        raise MeshError(f"--links {links}: gigabytes per second by axis, e.g. 300,25") from error
    chip = load_machine_or_preset(machine)
    published = PUBLISHED_SHAPES.get(model.lower())
    if published is not None:
        shape, side_by_side = published.model, published.parallel
    else:
        try:
            _, config = load_config(model)
        except ModelError as error:
            raise ModelError(f"{error}, {', '.join(PUBLISHED_SHAPES)}" if "presets" in str(error) else str(error)) \
                from error
        shape, side_by_side = load_model_shape(model), _side_by_side(config)
    capacity = parse_nbytes(memory, "--memory") if memory else chip.tiers["device"].capacity_nbytes
    batch, prompt, new_tokens = sizes
    chips = mesh_of(chip, tuple(map(int, parts)), rates)
    return PartitionProblem(shape, chips, MachineEstimator(chip), capacity, batch, prompt, new_tokens,
                            side_by_side if parallel is None else parallel, weights)


def _side_by_side(config: dict[str, Any]) -> bool:
    """Whether a config's blocks compute attention and feed-forward from the same input, as transformers names it."""
    kind = config.get("model_type")
    return bool(config.get("use_parallel_residual", kind == "gpt_neox") or config.get("parallel_attn", kind == "falcon")
                or kind in ("gptj", "codegen", "phi", "cohere", "cohere2"))


def _layout_data(layout: ChipLayout) -> dict[str, Any]:
    from forebay.rewriter.partition.layouts import NAMES

    return {"feedforward": NAMES[layout.feedforward], "attention": f"sharded over {layout.attention}",
            "hidden_axes": list(layout.wide), "gathered_axes": list(layout.gathered), "chunks": layout.chunks,
            "gather_chunks": layout.gather_chunks}


def _data(problem: PartitionProblem, found: Choice) -> dict[str, Any]:
    phases: dict[str, Any] = {}
    for name, seconds in found.phase_s.items():
        tokens = problem.batch * (problem.prompt if name == "prefill" else 1)
        kinds = [{"layers": kind.count, **_layout_data(layout), "time_s": cost.time_s, "compute_s": cost.compute_s,
                  "memory_s": cost.memory_s, "communication_s": cost.communication_s, "hidden_s": cost.hidden_s,
                  "collectives": [{"kind": c.kind, "axes": list(c.axes), "nbytes": c.nbytes, "what": c.what}
                                  for c in cost.collectives if problem.mesh.size(c.axes) > 1]}
                 for kind, layout, cost in zip(problem.model.layers, found.layouts[name], found.costs[name],
                                               strict=True)]
        phases[name] = {"latency_s": seconds, "chip_seconds_per_token": problem.mesh.chips * seconds / tokens,
                        "layers": kinds, "alternatives": [{**_layout_data(way), "layer_s": time_s}
                                                          for way, time_s in found.runners_up[name]]}
    return {"kind": "partition", "model": problem.model.name, "mesh": problem.mesh.name, "chips": problem.mesh.chips,
            "batch": problem.batch, "prompt": problem.prompt, "new_tokens": problem.new_tokens,
            "weights": problem.weights, "parallel_blocks": problem.parallel, "phases": phases,
            "total_s": found.total_s, "gap": found.gap,
            "memory_nbytes": {"weights": found.weights_nbytes, "cache": found.cache_nbytes,
                              "working": found.working_nbytes, "capacity": found.capacity_nbytes,
                              "margin": found.margin_nbytes}}


def _mesh(problem: PartitionProblem, runs: RunLayouts) -> str:
    """What `--mesh` is given for the layouts that run: the last axis divides the hidden size, and weights are gathered
    over the last ones."""
    way, chips, layout = runs.decode, problem.mesh.chips, runs.prefill.feedforward
    wide, gathered = problem.mesh.size(way.wide), problem.mesh.size(runs.prefill.gathered)
    shape = [chips // wide, wide] if layout != "xy" else [chips // gathered, gathered // wide, wide]
    parts = [f"tensor={'x'.join(map(str, shape if way.wide else [chips]))}"]
    looped = {"chunks": dict.fromkeys((runs.prefill.chunks, way.chunks)),
              "gather_chunks": dict.fromkeys((runs.prefill.gather_chunks, way.gather_chunks))}
    parts += [f"layout={layout}"] * bool(way.wide) + ["attention=batch"] * (way.attention == "batch")
    parts += [f"{name}={'/'.join(map(str, each))}" for name, each in looped.items() if list(each) != [1]]
    return ",".join(parts)


def _write_plans(model: str, problem: PartitionProblem, runs: RunLayouts | None, machine: str, folder: Path) -> Path:
    """The folder with the plan of each rank, for the machine and the memory that were chosen for. JobError where no
    layout runs, or the model is no folder."""
    from forebay.api import open_model
    from forebay.commands.options import model_folder
    from forebay.commands.plan_ranks import plans_of_ranks, save_ranks
    from forebay.commands.prompts import JobError
    from forebay.rewriter.ir.plan import Budget, Workload
    from forebay.rewriter.machine.presets import load_machine_or_preset
    from forebay.rewriter.planning.wishes import Wishes

    if runs is None:
        raise JobError("--plans: none of the layouts that run here fits")
    if not Path(model).is_dir():
        raise JobError(f"--plans: {model} is no folder with a model's weights, whose places in files plans name")
    work = Workload(problem.batch, problem.prompt, problem.new_tokens)
    budget = Budget(int(problem.capacity_nbytes), 0)
    save_ranks(plans_of_ranks(open_model(model_folder(model)), _mesh(problem, runs), budget, work, Wishes(),
                              load_machine_or_preset(machine)), folder)
    return folder


def _launch(model: str, problem: PartitionProblem, runs: RunLayouts | None, plans: Path | None) -> dict[str, Any]:
    """The command line of the best layouts that run here, and what they are; None where none fits. `plans` has those of
    the ranks, which say how much is computed at once and within what memory."""
    from forebay.rewriter.ir.byte_sizes import format_nbytes

    if runs is None:
        return {"launch": None}
    budget = format_nbytes(int(problem.capacity_nbytes)).replace(" ", "")
    how = f"--plan {plans}" if plans is not None else f"--batch {problem.batch} --budget device={budget}"
    folder = model if Path(model).is_dir() else problem.model.name
    return {"launch": f"torchrun --nproc-per-node={problem.mesh.chips} --no-python forebay run {folder} --prompts "
                      f"IN.jsonl --output OUT.jsonl {how} --mesh {_mesh(problem, runs)}",
            "launched": {"prefill": _layout_data(runs.prefill), "decode": _layout_data(runs.decode),
                         "total_s": runs.total_s}}


def _said(way: dict[str, Any]) -> str:
    """A layout in words."""
    looped = f", sums exchanged in {way['chunks']} chunks beside products" if way["chunks"] > 1 else ""
    gathers = f", inputs gathered in {way['gather_chunks']} chunks beside products" if way["gather_chunks"] > 1 else ""
    return f"{way['feedforward']}, attention {way['attention']}{looped}{gathers}"


def _text(data: dict[str, Any]) -> str:
    from forebay.rewriter.ir.byte_sizes import format_nbytes

    lines = [f"{data['model']} on {data['mesh']} chips ({data['chips']}), {data['batch']} sequences, prompt "
             f"{data['prompt']}, {data['new_tokens']} new tokens, weights {data['weights']}, "
             f"{'parallel' if data['parallel_blocks'] else 'serial'} blocks: a prediction"]
    for name, phase in data["phases"].items():
        lines.append(f"{name:8} {1e3 * phase['latency_s']:.4g} ms, {1e3 * phase['chip_seconds_per_token']:.4g} "
                     "chip-milliseconds a token")
        for kind in phase["layers"]:
            parts = {"compute": kind["compute_s"], "memory": kind["memory_s"], "communication": kind["communication_s"]}
            longest = max(parts, key=lambda part: parts[part])
            lines.append(f"  {kind['layers']} layers: {_said(kind)}; a layer "
                         + ", ".join(f"{part} {1e3 * time_s:.3g} ms" for part, time_s in parts.items())
                         + f": {longest} weighs most"
                         + f"; {1e3 * kind['hidden_s']:.3g} ms of communication beside products"
                         * (kind["hidden_s"] > 0))
        ways = phase["alternatives"]
        lines += [f"    {1e3 * way['layer_s']:9.4g} ms a layer  {_said(way)}" for way in ways]
    held = {name: format_nbytes(int(nbytes)) for name, nbytes in data["memory_nbytes"].items()}
    lines.append(f"memory   of a chip: weights {held['weights']}, cache {held['cache']}, working {held['working']}; "
                 f"{held['margin']} of {held['capacity']} left")
    if data["launch"] is None:
        lines.append("launch   none of the layouts that run here fits (docs/partitioning.md)")
    else:
        launched = data["launched"]
        lines.append(f"launch   {data['launch']}")
        ways = list(dict.fromkeys(map(_said, (launched["prefill"], launched["decode"]))))
        lines.append(f"         {'; then '.join(ways)}: of what runs here the best, "
                     f"{100 * (launched['total_s'] / data['total_s'] - 1):.1f} % above the choice")
    lines.append(f"solved   {data['total_s']:.4g} s for all tokens, gap {100 * data['gap']:.2g} %")
    lines.append("frontier phase     mesh       sequences   latency, ms   chip-ms a token")
    lines += [f"         {p['phase']:9} {p['mesh']:10} {p['batch']:9}  {1e3 * p['latency_s']:12.4g}  "
              f"{1e3 * p['chip_seconds_per_token']:16.4g}" for p in data["frontier"]]
    return "\n".join(lines)
