"""`forebay plan` and `forebay explain`: a plan made dry, of a model or of a config alone, and a saved one shown."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from forebay.commands.machine import machine_profile
from forebay.commands.options import (
    MODEL_HELP,
    BudgetOption,
    DebugOption,
    in_output,
    model_folder,
    named_budget,
    panel_option,
    prepare_draft,
    require_picture,
    require_writable,
    with_options,
)
from forebay.commands.seen_speeds import UNSEEN, seen_line
from forebay.commands.terminal import clean_errors, console, doing, say
from forebay.rewriter.planning.options import Options

if TYPE_CHECKING:
    from forebay.commands.plan_config import PlanRequest
    from forebay.rewriter.ir.graph import CapturedModel
    from forebay.rewriter.ir.plan import Budget, Plan, Workload
    from forebay.rewriter.machine.profile import Machine

in_model_and_machine, in_search = map(panel_option, ("Model and machine", "Search (with --config)"))
PROMPT = 64  # tokens, where none are named
EXPLORED = ("batch", "prompt", "new_tokens", "typical", "machine")  # what a search by closed forms alone goes by


@with_options(leave=("batch_slots", "plan"), said={
    "batch": "1; with --objective, --latency or --pareto: searched",
    "prompt": "64; with --config: 512", "new_tokens": "64; with --config: 32"})
def plan(
    options: Options,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = None,
    config: Annotated[str | None, in_model_and_machine(metavar="FILE|NAME",
        help="A config.json or a preset model such as opt-30b, instead of MODEL. Needs no weights; --budget takes "
             "sizes of all tiers.")] = None,
    weights: Annotated[str, in_model_and_machine(metavar="FORMAT", help="With --config: weights in rows of w4g64, "
             "w8g32 and so on, as forebay quantize writes them. Default: the config's own dtype.",
        show_default=False)] = "",
    budget: BudgetOption = None,
    rank: Annotated[int | None, in_output(min=0, help="Rank whose plan is shown, with --mesh. Default: 0. --save-plan "
             "writes all ranks' plans into a folder.")] = None,
    objective: Annotated[str, in_search(help="With --config: throughput, latency, or budget, the least device memory "
             "for --tokens-per-s. Default: none, one sequence.", show_default=False)] = "",
    latency: Annotated[float | None, in_search(metavar="SECONDS",
        help="With --config: most seconds for a whole batch.")] = None,
    tokens_per_s: Annotated[float | None, in_search(help="With --objective budget: throughput to reach.")] = None,
    explore: Annotated[bool, in_search("--explore", help="With --config: search of policies by closed forms alone. It "
             "is wider than plans that run: any share of every tensor on every tier.")] = False,
    quantize: Annotated[bool, in_search("--quantize", help="With --explore: 4-bit weights and cache as well.")] = False,
    recompute: Annotated[bool, in_search(
        help="With --explore: activation checkpoints, from which keys and values are recomputed.")] = True,
    diagonal: Annotated[bool, in_search("--diagonal", help="With --explore: the diagonal schedule as well.")] = False,
    pareto: Annotated[Path | None, in_output(metavar="OUT.png", help="Table and picture (.png, .svg) of latency "
             "against throughput, from one sequence to many. A JSON file is written too.")] = None,
    as_json: Annotated[bool, in_output("--json", help="Plan as JSON on stdout.")] = False,
    save_plan: Annotated[Path | None, in_output(help="File for the plan; of ranks a folder.")] = None,
    picture: Annotated[Path | None, in_output(metavar="OUT.png",
        help="Picture of a decode step: streams and memory over time, and a roofline.")] = None,
    debug: DebugOption = False,
) -> None:
    """Show memory, speed and bottleneck of a run before it starts. Reads no weight.

    \f
    Long: most of it is the options of its own.
    """
    with clean_errors(debug):
        from forebay.rewriter.ir.plan import PlanError

        if (model is None) == (config is None):
            raise PlanError("name a MODEL, or a --config to plan without one")
        if rank is not None and options.mesh is None:
            raise PlanError("--rank is for the plans of a --mesh")
        asked = options.forced()
        if config is not None:
            _refuse({f"--{name}": name in asked for name in ("adapter", "calibration", "draft", "dequantize", "mesh")},
                    "is for the weights of a MODEL")
            request = _request(config, options, budget, objective=objective or "throughput", latency_s=latency,
                               tokens_per_s=tokens_per_s, weights=weights)
            if not (options.batch or objective or latency or tokens_per_s or explore or pareto):
                request = replace(request, batch=1)
            if explore:
                _refuse({f"--{name.replace('_', '-')}": name not in EXPLORED for name in asked}
                        | {"--save-plan": save_plan, "--weights": weights},
                        "is for plans that run; --explore finds none")
                _explore(request, as_json, quantize=quantize, checkpoints=recompute, diagonal=diagonal, pareto=pareto)
                return
        _refuse({"--weights": weights and config is None}, "needs --config; forebay quantize packs a MODEL")
        _refuse({"--quantize": quantize, "--no-recompute": not recompute, "--diagonal": diagonal},
                "needs --config and --explore")
        if config is not None:
            _plan_config(request, options, as_json, save_plan, pareto)
            return
        _refuse({"--objective": objective, "--latency": latency is not None, "--explore": explore,
                 "--tokens-per-s": tokens_per_s is not None}, "needs --config")
        assert model is not None
        options = replace(options, new_tokens=options.new_tokens or 64)
        if budget is None and options.mesh is not None:
            raise PlanError("--mesh: name the --budget of each rank, as device=120MiB")
        sizes = named_budget(budget, cast("Machine | None", options.machine))
        if options.draft is not None:
            _refuse({"--json": as_json, "--save-plan": save_plan, "--picture": picture, "--pareto": pareto,
                     "--mesh": options.mesh}, "is for the plan of one model; leave it or --draft out")
            _plan_drafted(model, sizes, replace(options, prompt=options.prompt or PROMPT))
        elif options.mesh is not None:
            _refuse({"--picture": picture, "--pareto": pareto}, "is for the plan of one device; leave it or --mesh out")
            _plan_mesh(model, rank or 0, sizes, options, as_json, save_plan)
        else:
            _plan_model(model, sizes, options, as_json, save_plan, (picture, pareto))


def _refuse(given: dict[str, Any], why: str) -> None:
    """PlanError for the first option that is given."""
    from forebay.rewriter.ir.plan import PlanError

    for name, value in given.items():
        if value:
            raise PlanError(f"{name} {why}")


def _workload(options: Options, positions: int = 0) -> Workload:
    """Return the requested workload; the default prompt takes at most half of the model's `positions` (0: no limit)."""
    from forebay.rewriter.ir.plan import Workload

    prompt = options.prompt or (min(PROMPT, max(1, positions // 2)) if positions else PROMPT)
    return Workload(options.batch or 1, prompt, options.new_tokens or 1, *(options.typical or ()))


def _plan_model(
    model: str, sizes: Budget, options: Options, as_json: bool, save: Path | None,
    pictures: tuple[Path | None, Path | None],
) -> None:
    from forebay.calibration import calibrated
    from forebay.commands.pictures import draw_step
    from forebay.commands.plan_config import draw_frontier, frontier_lines
    from forebay.commands.process_memory import anonymous_nbytes, beside_nbytes, calls_of
    from forebay.images.open_tower import image_lines
    from forebay.model_planner import ModelPlanner
    from forebay.open_model import open_model
    from forebay.rewriter.ir.byte_sizes import format_nbytes
    from forebay.rewriter.pipeline.plan_search import plan_batch, plan_batches
    from forebay.rewriter.planning.objective import latency_s, tokens_per_s
    from forebay.rewriter.planning.options import check_choices
    from forebay.rewriter.policy.plan_search import plan_frontier

    workload = _workload(options)
    check_choices(workload, options)
    require_writable(save, "--save-plan")
    picture, pareto = pictures
    require_picture(picture, "--picture")
    require_picture(pareto, "--pareto")
    folder = model_folder(model, options)
    profile = machine_profile(options, folder)
    with doing("capturing the model"):
        planner = ModelPlanner(*(opened := open_model(folder)), sizes, profile)
        options = calibrated(options, opened[1].fingerprint, opened[0].dtype)
        workload = _workload(options, opened[0].max_positions)
    with doing("planning"):
        steps = planner.planned(workload, options, plan_batch)
        made, smallest = steps.plan, steps.pipeline.smallest_budget(options)
        others = plan_batches(planner.task(workload, options)) if pareto else []
    frontier = [(latency_s(p), tokens_per_s(p), p.workload.batch) for p in plan_frontier([made, *others])]
    if save:
        made.save(save)
    if picture:
        draw_step(made, steps.program(1), profile, picture)
    if pareto:
        draw_frontier({Path(model).name: frontier}, pareto)
    if as_json:
        print(made.to_json())
        return
    if seen := seen_line(made):
        print(seen)
    show_plan(made, opened[0], profile, "" if seen else UNSEEN, brief=_is_brief())
    for line in image_lines(opened[1], opened[0], options, profile.kind):
        print(line)
    print(*frontier_lines(frontier), sep="\n", end="\n" if len(frontier) > 1 else "")
    python, peak = anonymous_nbytes(), sum(made.prediction.peak_nbytes.values())
    beside = beside_nbytes(calls_of(steps.pipeline, made))
    print(f"process     {format_nbytes(python + peak + beside)} expected at the peak, as anonymous memory: "
          f"{format_nbytes(peak)} planned within the budget, {format_nbytes(python)} for Python and its imports "
          f"(measured; without a tokenizer), {format_nbytes(beside)} for threads and prepared launches and copies")
    print(f"smallest    a device budget of {format_nbytes(smallest)} ({smallest} bytes) would still work")


def _plan_mesh(
    model: str, rank: int, sizes: Budget, options: Options, as_json: bool, save: Path | None
) -> None:
    """Plan all ranks, write their plans, and show one."""
    from forebay.calibration import calibrated
    from forebay.commands.plan_ranks import plans_of_ranks, save_ranks, step_lines
    from forebay.open_model import open_model
    from forebay.read_mesh import read_mesh
    from forebay.rewriter.ir.plan import PlanError
    from forebay.rewriter.planning.options import check_choices

    mesh = cast("str", options.mesh)
    ranks, workload = read_mesh(mesh).ranks, _workload(options)
    if rank >= ranks:
        raise PlanError(f"--rank {rank}: the mesh {mesh} has ranks 0 to {ranks - 1}")
    check_choices(workload, options)
    folder = model_folder(model, options)
    profile = machine_profile(options, folder)
    with doing("capturing the model"):
        opened = open_model(folder)
    options = calibrated(options, opened[1].fingerprint, opened[0].dtype)
    made = plans_of_ranks(opened, mesh, sizes, workload, options, profile)
    if save:
        save_ranks(made, save)
    captured, _, plan = made[rank]
    if as_json:
        print(plan.to_json())
        return
    show_plan(plan, captured, profile, brief=_is_brief())
    print(*step_lines(made, profile), sep="\n")


def _plan_drafted(model: str, sizes: Budget, options: Options) -> None:
    """Show how a model and what may draft for it share the budget, or why nothing drafts."""
    from forebay.api import wrap

    folder = model_folder(model, options)
    options = replace(options, machine=machine_profile(options, folder))
    prepare_draft(options.draft, folder, sizes.device)
    with doing("capturing and planning"):
        lm = wrap(folder, sizes, options)
    print(lm.explain())


def _request(config: str, options: Options, budget: str | None, **asked: Any) -> PlanRequest:
    from forebay.commands.plan_config import PlanRequest
    from forebay.rewriter.ir.byte_sizes import parse_nbytes
    from forebay.rewriter.ir.plan import TIERS, PlanError
    from forebay.runtime.measure.kept import machine_cache_path

    capacity: dict[str, int] = {}
    for part in (budget or "").split(",") if budget else ():
        tier, equals, size = (text.strip() for text in part.partition("="))
        if not equals:
            tier, size = "device", tier
        if tier not in TIERS:
            raise PlanError(f"budget: unknown tier {tier!r}; the tiers are {', '.join(TIERS)}")
        capacity[tier] = parse_nbytes(size, f"budget.{tier}")
    if options.machine is None:
        kept = machine_cache_path(Path())
        if not kept.exists():
            raise PlanError("name a --machine, such as t4, or measure this one: forebay machine")
        options = replace(options, machine=kept)
    return PlanRequest(config, cast("Machine", options.machine), options.prompt or 512, options.new_tokens or 32,
                       batch=options.batch or 0, typical=options.typical, capacity=tuple(capacity.items()), **asked)


def _explore(request: PlanRequest, as_json: bool, **choices: Any) -> None:
    import json

    from forebay.commands.explore_config import explore_config, explore_text, plan_of_policy
    from forebay.rewriter.ir.plan import PlanError

    try:
        with doing("searching"):
            found = explore_config(request, **choices)
            found |= plan_of_policy(request, found)
    except ValueError as error:
        raise PlanError(str(error)) from error
    print(json.dumps(found, indent=1) if as_json else explore_text(found))


def _plan_config(request: PlanRequest, options: Options, as_json: bool, save: Path | None, pareto: Path | None) -> None:
    import json

    from forebay.commands.plan_config import draw_frontier, plan_config, plan_data, plan_text
    from forebay.rewriter.ir.plan import PlanError

    try:
        with doing("capturing and planning"):
            found = plan_config(request, options, complete=save is not None)
    except ValueError as error:
        raise PlanError(str(error)) from error
    if save:
        found.plan.save(save)
    if pareto is not None:
        draw_frontier({found.model: found.frontier}, pareto)
    if as_json:
        print(json.dumps(plan_data(found, request), indent=1))
        return
    print(plan_text(found))
    show_plan(found.plan, found.captured, request.known_machine, brief=_is_brief())


def _is_brief() -> bool:
    """Return whether the command runs without -v, which shows each layer."""
    return not logging.getLogger("forebay").isEnabledFor(logging.INFO)


def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="Plan file, from --save-plan.")],
    memory: Annotated[Path | None, typer.Option(help="PNG file for a picture of the device arena over time.")] = None,
    timeline: Annotated[bool, typer.Option("--timeline", help="The same picture as text.")] = False,
    debug: DebugOption = False,
) -> None:
    """Show a saved plan: a row per layer, and the memory over time."""
    with clean_errors(debug):
        from forebay.rewriter.ir.plan import load_plan
        from forebay.rewriter.report.explain import memory_timeline

        loaded = load_plan(plan)
        show_plan(loaded)
        if timeline:
            print()
            print(memory_timeline(loaded))
        if memory:
            from forebay.commands.pictures import draw_memory

            draw_memory(loaded, memory)
            say(f"wrote {memory}")


def show_plan(
    made: Plan, captured: CapturedModel | None = None, machine: Machine | None = None, doubt: str = "", *,
    brief: bool = False,
) -> None:
    """Print a plan for a machine to stdout: on a terminal with its layers as a table, elsewhere as plain text.

    `doubt` says why its times were not checked, where the machine itself gives no reason. A `brief` table has one row
    for neighboring layers of one size."""
    from forebay.rewriter.ir.state import unpackable
    from forebay.rewriter.planning.advice import advise
    from forebay.rewriter.report.explain import explain_plan, layer_rows, summarise_plan, table_cells

    advice = advise(made, captured is None or not unpackable(captured.states))
    if why := (machine.uncalibrated if machine is not None else "") or doubt:
        advice.append(f"uncalibrated: {why}")
    if not sys.stdout.isatty():
        print(explain_plan(made, captured, advice, brief=brief))
        return
    from rich.table import Table

    titles, *lines, totals = table_cells(layer_rows(made, captured), brief=brief)
    table = Table(show_footer=True)
    for title, total in zip(titles, totals, strict=True):
        text = title in ("layer", "format")
        table.add_column(title, total, justify="left" if text else "right", overflow="fold", no_wrap=not text)
    for line in lines:
        table.add_row(*line)
    terminal = console(stderr=False)
    terminal.print(summarise_plan(made, captured, advice), soft_wrap=True)
    terminal.print(table)
