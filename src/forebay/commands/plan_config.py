"""`forebay plan --config`: the plan that would run, from a config alone, for a machine that need not be here.

The model's graphs are captured from its config, without weights, and planned as those of a model are that runs; what
is searched beside that is the number of sequences.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forebay.commands.curves import draw_curves
from forebay.kept_graphs import config_key, keep_graphs, read_graphs
from forebay.rewriter.ir.alignment import whole_pages
from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.durations import format_seconds
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Workload
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.machine.presets import load_machine_or_preset
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.plan_search import ScheduleSearch, Way, closed_form_way, no_way
from forebay.rewriter.pipeline.plan_task import ModelGraphs, PlanTask
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.features.recomputation import try_checkpoints
from forebay.rewriter.planning.features.sparsity import NO_SCHEDULE
from forebay.rewriter.planning.objective import Objective, latency_s, tokens_per_s
from forebay.rewriter.planning.options import Options
from forebay.rewriter.planning.planner import make_plan
from forebay.rewriter.policy.block_costs import BlockShape
from forebay.rewriter.policy.plan_search import best_plan, blocks, plan_frontier, search_plans
from forebay.rewriter.predict.model_shapes import capture_config, load_config
from forebay.rewriter.switches import Switches, read_switches

OBJECTIVES = ("throughput", "latency", "budget")
COMPLETED_COPIES = 2500  # a copy takes about 1 ms to lower, prove and simulate
Point = tuple[float, float, int]  # seconds for a block of sequences, tokens per second, sequences


@dataclass(frozen=True)
class PlanRequest:
    """A request for a plan of a model on a machine.

    objective "throughput" (within `latency_s` for all sequences, if given), "latency" (of `batch` sequences) or
    "budget" (the least device memory that reaches `tokens_per_s`). `batch` 0 leaves the sequences to the search, and
    `weights` "" the weights in the config's own dtype.
    `capacity` overrides the machine's bytes per tier; times are of `typical` prompts and answers where they are given.
    """

    config: str  # a preset model's name or a config.json
    machine: str | Machine  # a preset's name or a file
    prompt: int = 512
    output: int = 32
    objective: str = "throughput"
    batch: int = 0
    latency_s: float | None = None
    tokens_per_s: float | None = None
    capacity: tuple[tuple[str, int], ...] = ()
    typical: tuple[int, int] | None = None
    weights: str = ""  # a format such as w4g64

    @property
    def known_machine(self) -> Machine:
        """The machine itself."""
        return self.machine if isinstance(self.machine, Machine) else load_machine_or_preset(self.machine)

    def wanted(self) -> Objective:
        """The objective; PlanError names a field that cannot be meant."""
        for name, value, low in (("prompt", self.prompt, 1), ("output", self.output, 1), ("batch", self.batch, 0)):
            if value < low:
                raise PlanError(f"{name}: {value} is below {low}")
        for typical, longest in zip(self.typical or (), (self.prompt, self.output), strict=False):
            if not 1 <= typical <= longest:
                raise PlanError(f"typical: {typical} tokens are not between 1 and the longest's {longest}")
        if self.objective not in OBJECTIVES:
            raise PlanError(f"objective: {self.objective!r} is not one of {', '.join(OBJECTIVES)}")
        if self.objective == "budget" and (self.tokens_per_s is None or self.tokens_per_s <= 0):
            raise PlanError("tokens_per_s: the smallest budget needs a throughput above 0 to reach")
        if self.latency_s is not None and self.latency_s <= 0:
            raise PlanError(f"latency_s: {self.latency_s} is not above 0")
        for tier, nbytes in self.capacity:
            if nbytes < (1 if tier == "device" else 0):
                raise PlanError(f"{tier}_nbytes: {nbytes} is too small")
        return Objective(self.objective, math.inf if self.latency_s is None else self.latency_s,  # type: ignore[arg-type]
                         self.tokens_per_s or 0.0, self.batch or 1)


@dataclass(frozen=True)
class ConfigPlan:
    """A plan for the model that a config describes, and the quickest plan for each throughput. Where it is not
    `complete`, a step has so many copies that lowering it takes minutes: what the plan decides is all there, its times
    are the closed form's, and its activations have no addresses yet."""

    model: str
    plan: Plan
    complete: bool
    captured: CapturedModel
    frontier: tuple[Point, ...]


def plan_config(request: PlanRequest, options: Options | None = None, *, complete: bool = False) -> ConfigPlan:
    """The best plan that runs, as the model itself would be planned on that machine; lowered and simulated, with
    `complete` also where that takes long. Where weights or cache of a batch are beyond the device, it may be a block
    of micro-batches whose caches lie on slower tiers: the fastest of a few by the closed form. (For the least device
    memory, objective "budget", the cache stays on the device.)

    Raises PlanError, BudgetError, ModelError or PresetError (all ValueErrors) that name the field, or the smallest
    budget that works.
    """
    objective, options = request.wanted(), options or Options()
    (name, values), machine = load_config(request.config), request.known_machine
    captured = _graphs(values, request.weights)
    limit = captured.max_positions
    if limit and request.prompt + request.output > limit:
        raise PlanError(f"prompt: {request.prompt} and {request.output} new tokens exceed the model's {limit} "
                        "positions")
    switches, (budget, spill_nbytes) = read_switches(), _budget(machine, dict(request.capacity), captured)
    described = json.dumps([values, request.weights], sort_keys=True).encode()
    fingerprint = f"config:{name}:{hashlib.sha256(described).hexdigest()[:16]}"

    whole = PlanTask(ModelGraphs.of(captured, _one_file(captured), fingerprint, machine, switches, options), budget,
                     Workload(1, request.prompt, request.output, *(request.typical or ())), options, machine, switches)

    @functools.cache
    def pipelines_of(batch: int) -> list[Pipeline]:
        task = whole.for_batch(batch)
        return [task.pipeline(batching) for batching in task.schedules()]

    ways: list[Way] = []

    def way_of(batch: int) -> Way | None:
        way = closed_form_way(whole.for_batch(batch), spill_nbytes)
        ways.extend([way] if way else [])
        return way

    def plan_for(block: BlockShape, budget: Budget) -> Plan:
        try:
            if options.cache_tier in ("host", "disk") and objective.kind != "budget":
                raise PlanError(NO_SCHEDULE)
            plan = _fastest(pipelines_of(block.size), budget, options)
        except PlanError as error:
            if objective.kind == "budget":
                raise
            if (way := way_of(block.size)) is None:
                raise (no_way(whole.for_batch(block.size)) if str(error) == NO_SCHEDULE else error) from None
            return way.plan
        if objective.kind == "budget" or not plan.prediction.streamed_nbytes or block.size == 1:
            return plan
        way = way_of(block.size)
        return plan if way is None else min(plan, way.plan, key=latency_s)

    batch = request.batch or (1 if objective.kind == "latency" else 0)
    plans = search_plans(plan_for, budget, objective, blocks(batch))
    best = best_plan(plans, objective)
    frontier = tuple((latency_s(p), tokens_per_s(p), p.workload.batch) for p in plan_frontier(plans))
    way, task = next((way for way in ways if way.plan is best), None), whole.for_batch(best.workload.batch)
    pipeline = way.pipeline.with_batching(way.batching) if way else next(
        each for each in pipelines_of(best.workload.batch) if each.graphs.batching == best.schedule.batching)
    best, complete = _lowered(task, pipeline, best, way is not None, complete)
    return ConfigPlan(name, best, complete, captured, frontier)


def _lowered(task: PlanTask, pipeline: Pipeline, plan: Plan, staged: bool, complete: bool) -> tuple[Plan, bool]:
    """A plan of the closed form, lowered and simulated with `complete` or unless a step has too many copies, and
    whether it is. A cache that is `staged` keeps checkpoints of a share of its tokens where that is faster."""
    search, few = ScheduleSearch(task), step_copies(plan) <= COMPLETED_COPIES
    if staged and not few:
        pipeline, plan = search.tried((pipeline, plan), [try_checkpoints], closed=True)
    if complete or few:
        plan = pipeline.plan(Budget(plan.budget.device, plan.budget.host), task.options)
    if staged and few:
        _, plan = search.tried((pipeline, plan), [try_checkpoints])
    return plan, complete or few


def _fastest(pipelines: Sequence[Pipeline], budget: Budget, options: Options) -> Plan:
    """The plan of the fastest of some schedules by the closed form; PlanError of the first where none fits."""
    found, refused = list[Plan](), list[PlanError]()
    for each in pipelines:
        try:
            found.append(make_plan(each.needs, budget, each.workload, options, each.machine.name))
        except PlanError as error:
            refused.append(error)
    if not found:
        raise refused[0] if refused else PlanError(NO_SCHEDULE)
    return min(found, key=latency_s)


def _graphs(config: dict[str, Any], weights: str) -> CapturedModel:
    """The graphs of a config's model, which the cache folder keeps: the next plan captures nothing."""
    key = config_key(config, weights) if read_switches() == Switches() else None
    if key is not None and (kept := read_graphs(key)) is not None:
        return kept[0]
    captured = capture_config(config, weights=weights)
    if key is not None:
        captured = rewrite_captured(captured, Switches())
        keep_graphs(key, captured, {}, [])
    return captured


def step_copies(plan: Plan) -> int:
    """Copies of a step, of which it launches what reads them for each micro-batch: tiles of the weights that stream."""
    size, batching = plan.schedule.slot_nbytes, plan.schedule.batching
    return batching.micro_batches.count * sum(
        -(-w.nbytes // size) for w in plan.weights if w.streams and (w.tile_rows or not w.gather))


def plan_data(found: ConfigPlan, request: PlanRequest) -> dict[str, Any]:
    """Return the result of `plan_config` as JSON data."""
    return {"kind": "plan", "complete": found.complete, "model": found.model, "machine": found.plan.machine,
            "objective": request.objective, "tokens_per_s": tokens_per_s(found.plan),
            "latency_s": latency_s(found.plan), "plan": asdict(found.plan),
            "pareto": frontier_data(found.frontier)}


def plan_text(found: ConfigPlan) -> str:
    """Format the first lines: model, machine, workload and predicted throughput."""
    plan, work = found.plan, found.plan.workload
    lines = [f"a plan, as it would run: {found.model} on {plan.machine}, {sequences(work.batch)}, "
             f"prompt {work.prompt}, {work.new_tokens} new tokens",
             f"predicted   {tokens_per_s(plan):.3g} tokens/s; {format_seconds(latency_s(plan))} for all sequences"]
    if not found.complete:
        lines.append(f"            by the closed form: {step_copies(plan)} copies a step, lowered only for --save-plan")
    return "\n".join([*lines, *frontier_lines(found.frontier)])


def frontier_lines(points: Sequence[Point]) -> list[str]:
    """Format the points of a frontier of more than one, a line each."""
    return [f"frontier    {sequences(size):>14} {format_seconds(time_s):>12} {rate:10.3g} tokens/s"
            for time_s, rate, size in points if len(points) > 1]


def sequences(count: int) -> str:
    """Format a number of sequences."""
    return "1 sequence" if count == 1 else f"{count} sequences"


def frontier_data(points: Sequence[Point]) -> list[dict[str, float]]:
    """A frontier for JSON."""
    return [{"sequences": size, "latency_s": time_s, "tokens_per_s": rate} for time_s, rate, size in points]


def draw_frontier(curves: dict[str, Sequence[Point]], path: Path) -> None:
    """Latency of a block against throughput, both logarithmic, as FlexGen's Figure 1; one curve per name, to a PNG and
    to JSON beside it.

    Raises PlanError for a path whose ending matplotlib cannot write.
    """
    try:
        draw_curves({name: [(time_s, rate, str(size)) for time_s, rate, size in points]
                     for name, points in curves.items()}, ("latency of a block, s", "throughput, tokens/s"),
                    "sequences in the block", path,
                    [point for points in curves.values() for point in frontier_data(points)])
    except ValueError as error:
        raise PlanError(str(error)) from error


def _budget(machine: Machine, given: dict[str, int], captured: CapturedModel) -> tuple[Budget, int]:
    """Return the given budget, or the machine's memory, and the disk space besides the weights' files. Where the device
    is a part of host memory, the host gets nothing more."""
    room = {tier: held.capacity_nbytes for tier, held in machine.tiers.items()} | given
    if room["disk"] < captured.weight_nbytes:
        raise PlanError(f"budget.disk: the weights' files take {format_nbytes(captured.weight_nbytes)} "
                        f"({captured.weight_nbytes} bytes), {format_nbytes(room['disk'])} are given; add "
                        "disk=SIZE to the budget to plan for another disk")
    beside = room.get("host", 0) if machine.host_hop else given.get("host", 0)
    return Budget(room["device"], beside), room["disk"] - captured.weight_nbytes


def _one_file(captured: CapturedModel) -> dict[str, FileSlice]:
    """Return the places of weights in a checkpoint of one file, each at a page."""
    files, at = {}, 0
    for name, spec in captured.weights.items():
        files[name] = FileSlice("weights", at, spec.nbytes)
        at += whole_pages(spec.nbytes)
    return files
