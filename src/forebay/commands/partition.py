"""`forebay partition`: layouts of a model over several chips, predicted, and what to launch; no weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.commands.options import DebugOption, in_output, require_picture
from forebay.commands.terminal import JobError, clean_errors

if TYPE_CHECKING:
    from forebay.rewriter.partition.choose import Choice, PartitionProblem, RunLayouts
    from forebay.rewriter.partition.layouts import ChipLayout

SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # sequences of the frontier


def partition(
    model: Annotated[str, typer.Argument(metavar="NAME|FILE",
        help="Preset model such as palm-540b, or a config.json.")],
    mesh: Annotated[list[str], typer.Option(metavar="AxBxC",
        help="Chips along each axis, e.g. 4x4x4 or 8. The layout is for the first mesh, the frontier for all.")],
    machine: Annotated[str, typer.Option(metavar="NAME|FILE", help="Chip: a preset or a machine profile.")] = "tpu-v4",
    links: Annotated[str | None, typer.Option(metavar="GB/S,…",
        help="Bandwidth of a chip along each axis. Default: the machine's interconnect.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE",
        help="Memory of one chip. Default: the machine's.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Number of sequences.")] = 64,
    prompt: Annotated[int, typer.Option(min=1, help="Prompt, in tokens.")] = 2048,
    new_tokens: Annotated[int, typer.Option(min=1, help="Answer, in tokens.")] = 64,
    weights: Annotated[str, typer.Option(metavar="FORMAT",
        help="Dtype of weights: bfloat16, int8 (computed in bfloat16), float16 or float32.")] = "bfloat16",
    parallel: Annotated[bool | None, typer.Option("--parallel/--serial",
        help="Parallel attention and feed-forward. Default: the model's.")] = None,
    pareto: Annotated[Path | None, typer.Option(metavar="OUT.png",
        help="Picture file of the frontier; a JSON file is written too.")] = None,
    plans: Annotated[Path | None, typer.Option(metavar="FOLDER",
        help="Folder for the plan of each rank. The model must then be a folder with weights.")] = None,
    as_json: Annotated[bool, in_output("--json", help="Result as JSON on stdout.")] = False,
    debug: DebugOption = False,
) -> None:
    """Choose layouts of a model over several chips, and predict cost against latency."""
    with clean_errors(debug):
        from forebay.commands.partition_frontier import draw_cost, frontier_of
        from forebay.commands.partition_launch import launched, write_plans

        require_picture(pareto, "--pareto")
        try:
            problems = [_problem(model, text, machine, links, memory, weights, parallel, (batch, prompt, new_tokens))
                        for text in mesh]
            from forebay.rewriter.partition.choose import choose, ways_here

            found = choose(problems[0])
            runs, why = launched(model, problems[0], ways_here(problems[0]))
            points = frontier_of(problems, sorted({*SWEEP, batch}))
        except ValueError as error:  # MeshError, ModelError, PartitionError, PresetError: all name what to change
            raise JobError(str(error)) from error
        if pareto is not None:
            draw_cost(points, pareto)
        written = None if plans is None else write_plans(model, problems[0], runs, why, machine, plans)
        data = _data(problems[0], found) | _launch(model, problems[0], runs, why, written) | {"frontier": points}
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
    """Return whether a config's blocks compute attention and feed-forward from the same input, as transformers names
    it."""
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


def _launch(model: str, problem: PartitionProblem, runs: RunLayouts | None, why: str, plans: Path | None
            ) -> dict[str, Any]:
    """The command line of the best layouts that run here, and what they are; None where there are none, and why."""
    from forebay.commands.partition_launch import launch_command

    if runs is None:
        return {"launch": None, "launched": None, "why": why}
    return {"launch": launch_command(model, problem, runs, plans),
            "launched": {"prefill": _layout_data(runs.prefill), "decode": _layout_data(runs.decode),
                         "total_s": runs.total_s}}


def _said(way: dict[str, Any]) -> str:
    """A layout in words."""
    looped = f", sums exchanged in {way['chunks']} chunks beside products" if way["chunks"] > 1 else ""
    gathers = f", inputs gathered in {way['gather_chunks']} chunks beside products" if way["gather_chunks"] > 1 else ""
    return f"{way['feedforward']}, attention {way['attention']}{looped}{gathers}"


def _text(data: dict[str, Any]) -> str:
    from forebay.rewriter.ir.byte_sizes import format_nbytes
    from forebay.rewriter.ir.durations import format_seconds

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
                         + ", ".join(f"{part} {format_seconds(time_s)}" for part, time_s in parts.items())
                         + f": {longest} weighs most"
                         + f"; {format_seconds(kind['hidden_s'])} of communication beside products"
                         * (kind["hidden_s"] > 0))
        ways = phase["alternatives"]
        lines += [f"    {1e3 * way['layer_s']:9.4g} ms a layer  {_said(way)}" for way in ways]
    held = {name: format_nbytes(int(nbytes)) for name, nbytes in data["memory_nbytes"].items()}
    lines.append(f"memory   of a chip: weights {held['weights']}, cache {held['cache']}, working {held['working']}; "
                 f"{held['margin']} of {held['capacity']} left")
    if data["launch"] is None:
        lines.append(f"launch   {data['why']}")
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
