"""From captured graphs to verified Programs: the order of everything, in one place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx

from forebay.passes.lower.grow_cache import grow_cache
from forebay.passes.lower.place_copies import place_copies
from forebay.passes.place.allocate_buffers import place_activations
from forebay.passes.place.repeat_layout import repeats
from forebay.rewriter.capture.step_graphs import StepGraphs
from forebay.rewriter.garbage import no_collection
from forebay.rewriter.ir.cache_layout import cache_buffers, cache_rows, staged_layers
from forebay.rewriter.ir.draft import Draft
from forebay.rewriter.ir.graph import META
from forebay.rewriter.ir.plan import MOVING, Budget, GemmChoice, Plan, PlanError, Prediction, Workload, validate
from forebay.rewriter.ir.products import Shape
from forebay.rewriter.ir.program import Program
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.cache_launches import cache_launches
from forebay.rewriter.pipeline.pass_list import PASSES, passes_in
from forebay.rewriter.pipeline.run_passes import Stage, check_switches
from forebay.rewriter.pipeline.step_analysis import StepAnalysis
from forebay.rewriter.planning.best_product import known_names
from forebay.rewriter.planning.check_plan import check_plan, check_prediction, check_products, refuse_cache
from forebay.rewriter.planning.graph_needs import (
    launch_count,
    read_by_both,
    read_together,
    weight_products,
    weight_uses,
)
from forebay.rewriter.planning.launch_memory import with_draw
from forebay.rewriter.planning.model_needs import ModelNeeds, PhaseNeed
from forebay.rewriter.planning.options import Options
from forebay.rewriter.planning.planner import make_plan, smallest_budget
from forebay.rewriter.planning.product_shapes import planned_shapes, weights_of_layers
from forebay.rewriter.planning.staged_cache import staged_places
from forebay.rewriter.predict.closed_form import rates_of
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.of_programs import predict, usually_seen
from forebay.rewriter.report.dump import Dump
from forebay.rewriter.switches import Switches
from forebay.rewriter.verify.bisect import RunStep
from forebay.rewriter.verify.program import verify_program
from forebay.runtime.run.run_once import run_once


class Pipeline:
    """Plans and lowers one model's `StepGraphs` for one workload; programs are made when first asked for and kept."""

    @no_collection()
    def __init__(self, graphs: StepGraphs, workload: Workload, machine: Machine, switches: Switches,
                 steps: StepAnalysis | None = None) -> None:
        check_switches(PASSES, switches)
        refuse_cache(graphs.cache_format, machine.kind)
        self.graphs, self.workload, self.machine, self.switches = graphs, workload, machine, switches
        self.steps = steps or StepAnalysis(graphs, machine, not switches.no_reuse)
        self._planned: Plan | None = None  # the plan that `_programs` are of
        self._programs: dict[int, Program] = {}
        decode = graphs.step(1)
        self._fresh: dict[object, fx.GraphModule] = {(1, False): decode}  # made and not yet used up by passes
        count, checks = graphs.batching.micro_batches.count, graphs.batching.speculation.steps
        if checks and not graphs.rewindable:  # whose states such steps save
            self._fresh[checks[0], False] = graphs.step(checks[0])
        self._cache_rows = {} if graphs.prefill is None else {
            name: replace(rows, rows=count * rows.rows) for name, rows in cache_rows(decode).items()}
        uses = weight_uses(decode, set(graphs.constants))
        several = max(workload.prompt, *checks, 2 if graphs.gathers else 1)
        if several > 1:  # whose operands may lie in other ways, so that they are no rows
            uses = read_by_both(uses, weight_uses(graphs.step(several), set(graphs.constants)))
        uses = [replace(u, slices=graphs.files[u.name].slices) if u.name in graphs.files else u for u in uses]
        self.needs = ModelNeeds(
            graphs.fingerprint, uses,
            {name: t.numel() * t.element_size() for name, t in graphs.constants.items()},
            {name: count * nbytes for graph in self._fresh.values() for name, nbytes in cache_buffers(graph).items()},
            self.need, graphs.weight_tier, graphs.host_hop,
            {name: rows.nbytes(workload.prompt) for name, rows in self._cache_rows.items()},
            rates_of(MachineEstimator(machine), weight_products(uses), workload.batch, graphs.weight_tier,
                     cache_launches(decode), graphs.batching, launch_count(decode), workload,
                     cache_launches(graphs.step(2)) if graphs.batching.latents.expanded else ()),
            graphs.batching, weights_of_layers(decode), graphs.cache_format,
            staged_places(decode, graphs.batching, workload.prompt), read_together(decode),
            machine.kind.slot_nbytes).with_feature_moves()
        if graphs.batching.cache.staged:
            self.needs = self.needs.staging(staged_layers(decode, graphs.batching, graphs.step), graphs.batching,
                                            workload)

    def with_speculative(self, sizes: tuple[int, ...]) -> Pipeline:
        """The pipeline with steps of these sizes too, which check drafted tokens. PlanError where there are none."""
        return Pipeline(self.graphs.speculating(sizes), self.workload, self.machine, self.switches)

    def with_batching(self, batching: BatchSchedule) -> Pipeline:
        """The pipeline of the same graphs with caches in the shares of `batching`; what else differs is who attends."""
        if batching == self.graphs.batching:
            return self
        graphs = replace(self.graphs, batching=batching)
        steps = self.steps if self.steps.serves(graphs) else None
        return Pipeline(graphs, self.workload, self.machine, self.switches, steps)

    @no_collection()
    def plan(self, budget: Budget, options: Options | None = None) -> Plan:
        """The complete plan for `budget`."""
        plan = self._choose(budget, options or Options())
        if not self._layers_repeat(plan):
            plan = self._choose(budget, options or Options())
        return self.complete(plan)

    @no_collection()
    def replay(self, plan: Plan) -> Plan:
        """`plan`, perhaps edited by hand, once it is found to suit the model; predicted anew where it comes from
        another machine. All activations, all products or the prediction may be left out, and are then planned.
        PlanError names the field that does not suit."""
        validate(plan)
        self._layers_repeat(plan)
        plan = self._filled(plan)
        check_plan(plan, self.needs, self.workload)
        check_products(plan, self._shapes(plan), self._implementations(plan))
        found = self._predicted(plan)
        check_prediction(plan.prediction, found, plan.machine == self._record)
        return self._keep(replace(plan, machine=self._record, prediction=found))

    def complete(self, plan: Plan) -> Plan:
        """A plan of the planner with activations placed, implementations chosen and times predicted: after this nobody
        decides anything."""
        s, largest = plan.schedule, self.steps.layout(plan.schedule.prefill_chunk)
        chunks = tuple(c for c in s.prefill_chunks if self.steps.layout(c).within(largest))
        plan = self._filled(replace(plan, schedule=replace(s, prefill_chunks=chunks)))
        return self._keep(replace(plan, prediction=self._predicted(plan)))

    def smallest_budget(self, options: Options | None = None) -> int:
        """The least device budget in bytes that a plan exists for."""
        return smallest_budget(self.needs, self.workload, options or Options())[0]

    @no_collection()
    def program(self, plan: Plan, tokens: int) -> Program:
        """The verified Program of a step over `tokens` tokens per sequence, one of those that the plan names."""
        if plan != self._planned:
            self._planned, self._programs = plan, {}
        if tokens not in self._programs:
            try:
                self._programs[tokens] = self._lowered(plan, tokens)
            except PlanError:
                raise
            except (KeyError, ValueError, IndexError) as error:  # a plan edited by hand may say anything
                raise PlanError(f"the plan does not fit the model's graph ({type(error).__name__}: {error}); plan again"
                                ) from error
        return self._programs[tokens]

    def growth(self, plan: Plan) -> Program | None:
        """The verified Program that runs between prefill and decoding where the cache is then given more room."""
        if not plan.prefill_overlays_kv_cache:
            return None
        narrow, wide = ([b for b in plan.buffers if b.kind == "cache" and b.phase == phase]
                        for phase in ("prefill", "decode"))
        lengths = plan.workload.prompt, plan.workload.context
        try:
            program = grow_cache(narrow, wide, self._cache_rows, lengths, plan.arenas)
        except (KeyError, ValueError) as error:
            raise PlanError(f"the plan's cache cannot grow from prefill to decoding: {error}; plan again") from error
        if self.switches.verify:
            verify_program(program, {"device": plan.budget.device, "host": plan.budget.host or None})
        return program

    # -- what plans are made from

    def _choose(self, budget: Budget, options: Options) -> Plan:
        return make_plan(self.needs, budget, self.workload, options, self._record)

    def _filled(self, plan: Plan) -> Plan:
        """`plan` with activations placed and implementations chosen, if it has none."""
        if not any(b.kind in MOVING and b.phase != "all" for b in plan.buffers):
            moving = [b for phase, tokens in plan.schedule.largest_steps.items()
                      for b in place_activations(self.steps.layout(tokens), plan.during(tokens), phase)]
            plan = replace(plan, buffers=(*plan.buffers, *moving))
        shapes = () if plan.gemm else sorted(self._shapes(plan))
        most = self.needs.workspace(plan.schedule.prefill_chunk)
        chosen = (GemmChoice(*shape, impl=self.steps.best_gemm(shape, most)) for shape in shapes)
        return replace(plan, gemm=(*plan.gemm, *chosen))

    @cached_property
    def _record(self) -> str:
        """The machine that predictions hold for: its name, and a digest of all that they are made from."""
        known = f"{self.machine} {torch.get_num_threads()} {torch.__version__}"
        return f"{self.machine.name} #{hashlib.sha256(known.encode()).hexdigest()[:12]}"

    def need(self, tokens: int) -> PhaseNeed:
        """Return the memory of a step over `tokens` tokens besides weights and cache."""
        return self.steps.need(tokens)

    def _step(self, plan: Plan, tokens: int) -> fx.GraphModule:
        """A fresh graph of a step, which passes may use up."""
        key = tokens, plan.prefill_overlays_kv_cache and plan.schedule.phase_of(tokens) == "prefill"
        made = self.graphs.prefill if key[1] and self.graphs.prefill is not None else self.graphs.step
        return self._fresh.pop(key, None) or made(tokens)

    def _layers_repeat(self, plan: Plan) -> bool:
        """Return whether equal layers can share addresses in the steps of `plan`; if not, steps are analyzed layer by
        layer from here on, and take more memory than the planner knew."""
        if self.steps.each_layer:
            return True
        alike = True
        for phase, tokens in plan.schedule.largest_steps.items():
            gm = self._step(plan, tokens)
            self._fresh[tokens, plan.prefill_overlays_kv_cache and phase == "prefill"] = gm
            alike = alike and repeats(gm, self.steps.layout(tokens))
        if not alike:
            self.steps = StepAnalysis(self.graphs, self.machine, self.steps.reuse, each_layer=True)
        return alike

    def _shapes(self, plan: Plan) -> set[Shape]:
        """The shapes of all matrix products of all steps of `plan`."""
        return {shape for tokens in plan.schedule.step_sizes for shape in planned_shapes(
            plan, self.need(tokens).products, self.needs.layers, self.steps.layout(tokens).representatives)}

    def _implementations(self, plan: Plan) -> dict[str, tuple[str, ...]]:
        """Return the implementations of matmuls here, by dtype or format; on a GPU all that its kernels name."""
        if not self.machine.kind.on_host_cores:
            return {}
        return {dtype: known_names(dtype) for dtype, *_ in self._shapes(plan)}

    # -- from a plan to Programs

    def _keep(self, plan: Plan) -> Plan:
        """`plan`, whose Programs are those made last: it adds a prediction to the plan that they were made from."""
        self._planned = plan
        Dump(self.switches.dump, "").plan(plan)
        return plan

    def _predicted(self, plan: Plan) -> Prediction:
        """Predict the times of the Programs of `plan` on this machine."""
        return predict(plan, partial(self.program, plan), self.machine, self.growth(plan))

    def _runs(self, plan: Plan) -> Callable[[Draft | Program], RunStep] | None:
        """Return a function that runs a step of `plan` for comparison: its copies placed, if they are not, and one
        after the other. None for a GPU, and where the graph is of some of the sequences or caches come to the device
        for their turns."""
        batching = plan.schedule.batching
        if not self.machine.kind.on_host_cores or (
                batching.micro_batches.count > 1 or batching.admitted or batching.cache.staged):
            return None

        def runs(step: Draft | Program) -> RunStep:
            program = place_copies(step, plan) if isinstance(step, Draft) else step
            return lambda weights, inputs: run_once(program, weights, self.graphs.files, inputs)

        return runs

    def _lowered(self, plan: Plan, tokens: int) -> Program:
        """Run all passes on a fresh graph, lower it and prove the Program."""
        if tokens not in plan.schedule.step_sizes:
            raise PlanError(f"plan.schedule.prefill_chunks: no step over {tokens} tokens is planned, only over "
                            f"{', '.join(map(str, plan.schedule.step_sizes))}")
        gm, seen = self._step(plan, tokens), plan.during(tokens)
        gm.meta[META] = self.steps.layout(tokens)
        stage = Stage(gm, self.switches, f"{tokens}_tokens", runs=self._runs(seen))
        for each in passes_in("planned"):
            stage.run(each, lambda _: (seen,))
        kind = self.machine.kind
        beside = {"lower": (self.graphs.files, kind.with_memory, f"step of {tokens} tokens"),
                  "join_launches": (kind.joins, kind.with_memory)}
        program: Any = stage.gm
        for each in passes_in("lowered"):
            program = stage.lowered(each, program, seen, *beside.get(each.name, ()))
        program = replace(program, step=tuple(with_draw(program.step, kind.draw_nbytes(self.graphs.words))))
        budget = {"device": plan.budget.device, "host": plan.budget.host or None}
        for tier, limit in budget.items():
            taken = plan.arenas.get(tier, 0) + program.workspace_nbytes(tier)
            if limit is not None and taken > limit:
                raise PlanError(f"plan.arenas.{tier}, plan.budget.{tier}: {program.name} takes {taken} bytes, with the "
                                f"workspace of its operators, {limit} are allowed")
        if self.switches.verify:
            verify_program(program, budget)
        return replace(program, seen={n: usually_seen(plan, n) for n in (1, tokens)})
