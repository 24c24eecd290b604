"""From captured graphs to verified Programs: the order of everything, in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import fx

from forebay.kernels import operators
from forebay.kernels.operator import Product
from forebay.passes.fuse.fuse_residual import fuse_residual
from forebay.passes.fuse.fuse_rms_norm import fuse_rms_norm
from forebay.passes.fuse.fuse_rotary import fuse_rotary
from forebay.passes.fuse.fuse_swiglu import fuse_swiglu
from forebay.passes.lower.draft import Draft
from forebay.passes.lower.grow_cache import grow_cache
from forebay.passes.lower.hoist_prefetch import hoist_prefetch
from forebay.passes.lower.launches import Launches
from forebay.passes.lower.lower import lower
from forebay.passes.lower.place_copies import place_copies
from forebay.passes.place.allocate_buffers import allocate_buffers, plan_activations
from forebay.passes.place.insert_transfers import insert_transfers
from forebay.passes.place.repeat_layout import repeats
from forebay.passes.place.select_gemm import product_shape, select_gemm
from forebay.passes.place.shorten_lifetimes import shorten_lifetimes
from forebay.passes.place.specialise_blocks import block_graphs, specialise_blocks
from forebay.rewriter.capture.concretise import inline_blocks
from forebay.rewriter.capture.step_graphs import StepGraphs
from forebay.rewriter.garbage import no_collection
from forebay.rewriter.ir.graph import META, Layout, values_of
from forebay.rewriter.ir.plan import Budget, GemmChoice, Plan, Prediction, Workload
from forebay.rewriter.ir.program import Launch, Program, TensorRef
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.planning.graph_needs import cache_buffers, cache_rows, weight_products, weight_uses
from forebay.rewriter.planning.planner import Facts, PhaseNeed, Wishes, make_plan, smallest_budget
from forebay.rewriter.predict.closed_form import rates_of
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.simulate import STEPS, Timeline, simulate
from forebay.rewriter.report.dump import Dump
from forebay.rewriter.switches import SwitchError, Switches
from forebay.rewriter.verify.bisect import Bisection
from forebay.rewriter.verify.program import verify_program

# Each pass with the reason why it stands where it does.
PASSES: tuple[tuple[Callable[[fx.GraphModule, Plan], None], str], ...] = (
    (specialise_blocks, "first: the rest see a weight's placement, which layers of one kind need not share"),
    (insert_transfers, "it splits matrix products into tiles, and every later pass must see the tiles"),
    (select_gemm, "after tiling, because the choice depends on the tile's shape"),
    (allocate_buffers, "last: addresses depend on the plan's arena alone, lifetimes on the order, which is final"),
)
# On the step as a list of launches (lowering's draft), where the order of the whole step can be seen.
DRAFT_PASSES: tuple[tuple[Callable[[Draft, Plan], None], str], ...] = (
    (hoist_prefetch, "copies cross the borders of layers, so they are ordered where layers are laid end to end"),
)
WHOLE_STEP = (specialise_blocks, allocate_buffers)  # run once on the step graph; the others on its blocks too
# On captured graphs, once per kind of layer, before there is a plan: what they fold, the planner never sees.
BLOCK_PASSES: tuple[tuple[Callable[[fx.GraphModule], None], str], ...] = (
    (fuse_rms_norm, "first: the norms stand between everything else, and no other pattern contains one"),
    (fuse_rotary, "queries and keys, before attention reads them"),
    (fuse_swiglu, "before fuse_residual: what it folds comes first in the product that both may end in"),
    (fuse_residual, "it takes the products that the others leave"),
    (shorten_lifetimes, "last: it orders what the others left; queries are made after keys and values are stored"),
)
# without: slower, not wrong
OPTIONAL = ("hoist_prefetch", "select_gemm", "fuse_rms_norm", "fuse_rotary", "fuse_swiglu", "fuse_residual",
            "shorten_lifetimes")


class Pipeline:
    """Plans and lowers one model's `StepGraphs` for one workload; programs are made when first asked for and kept."""

    @no_collection()
    def __init__(self, source: StepGraphs, workload: Workload, machine: Machine, switches: Switches) -> None:
        known = [run_pass.__name__ for run_pass, _ in (*PASSES, *DRAFT_PASSES)]
        for name in switches.skip:
            if name not in OPTIONAL:
                raise SwitchError(f"FOREBAY_SKIP: {name!r} cannot be skipped; those that can: {', '.join(OPTIONAL)}")
        if switches.stop_after and switches.stop_after not in known:
            raise SwitchError(f"FOREBAY_STOP_AFTER: no pass {switches.stop_after!r}; they are {', '.join(known)}")
        self.source, self.workload, self.machine, self.switches = source, workload, machine, switches
        self._needs: dict[int, PhaseNeed] = {}
        self._layouts: dict[int, Layout] = {}
        self._each_layer = False  # activations are planned layer by layer: equal ones cannot share addresses
        self._programs: dict[tuple[int, int], Program] = {}
        self._planned: Plan | None = None
        decode = source.step(1)
        self._steps: dict[int, fx.GraphModule] = {1: decode}  # made and not yet used up by passes
        count = source.block.micro_batches
        self._cache_rows = {} if source.prefill is None else {
            name: replace(rows, rows=count * rows.rows) for name, rows in cache_rows(decode).items()}
        uses = weight_uses(decode, set(source.constants))
        self.facts = Facts(
            source.fingerprint, uses,
            {name: t.numel() * t.element_size() for name, t in source.constants.items()},
            {name: count * nbytes for name, nbytes in cache_buffers(decode).items()},
            self.need, source.weight_tier, source.host_hop,
            {name: rows.nbytes(workload.prompt) for name, rows in self._cache_rows.items()},
            rates_of(MachineEstimator(machine), weight_products(uses), workload.batch, source.weight_tier, count),
            source.block)

    def need(self, tokens: int) -> PhaseNeed:
        """Activation and workspace bytes of a step over `tokens` tokens per sequence."""
        found = self._needs.get(tokens)
        if found is None:
            if self.source.sample is not None and not self._each_layer:
                flat, likes = self.source.sample(tokens)
            else:
                flat, likes = inline_blocks(self.source.step(tokens)), {}
            layout = plan_activations(flat, not self.switches.no_reuse, self.source.block)
            self._layouts[tokens] = replace(layout, likes=likes)
            found = self._needs[tokens] = PhaseNeed(layout.height, self._most_workspace(flat))
        return found

    def _workspace(self, launch: Launch) -> int:
        """Transient bytes that a launch of one of our own operators takes beside its operands."""
        operator = operators.find(launch.op)
        if operator is None:
            return 0
        if operator.implementations is not None and not launch.impl:
            launch = replace(launch, impl=self._best_gemm(operator.implementations.shape(launch)))
        return operator.workspace_nbytes(launch, self._device)

    @property
    def _device(self) -> str:
        """Which of an operator's bindings runs here."""
        return "cpu" if self.machine.device_kind == "cpu" else "cuda"

    def _best_gemm(self, shape: tuple[str, int, int, int]) -> str:
        """The fastest implementation measured on this machine; where not all were measured, the kernels' own choice."""
        product = Product(*shape)
        choice = operators.product_with(product.weight).implementations
        assert choice is not None
        if self._device == "cpu":
            measured, known = set(self.machine.gemm_impls(product.weight)), set(choice.candidates(product.weight))
            if known and measured >= known:  # a profile made where there was a compiler names kernels that need one
                return self.machine.best_gemm(*product, known)
        return choice.default[self._device](product, self.machine.device_kind)

    def _most_workspace(self, flat: fx.GraphModule) -> int:
        """The largest transient memory of any node of a flat graph."""
        launches = Launches(_nowhere, self._workspace)
        nodes = [n for n in flat.graph.nodes if n.op == "call_function" and n.meta.get("alias_of") is None]
        return max((launch.workspace_nbytes for n in nodes for launch in launches.of(n)), default=0)

    @no_collection()
    def plan(self, budget: Budget, wishes: Wishes | None = None) -> Plan:
        """The plan for `budget`, with its table of matrix products and its prediction filled in."""
        wishes = wishes or Wishes()
        try:
            return self.complete(make_plan(self.facts, budget, self.workload, wishes, self.machine.name))
        except _LayersDiffer:
            return self.complete(make_plan(self.facts, budget, self.workload, wishes, self.machine.name))

    def smallest_budget(self, wishes: Wishes | None = None) -> int:
        """The least device budget in bytes that a plan exists for."""
        return smallest_budget(self.facts, self.workload, wishes or Wishes())[0]

    def complete(self, plan: Plan) -> Plan:
        """`plan` with implementations chosen, activations placed and times predicted, from its own Programs."""
        chunk = plan.schedule.prefill_chunk
        programs, buffers, choices = {}, list(plan.buffers), []
        for tokens in sorted({1, chunk}):
            programs[tokens], layout, chosen = self._lowered(_kept(plan, tokens), tokens)
            choices += [c for c in chosen if c not in choices]
            phase = "decode" if tokens == 1 else "prefill"
            buffers += [replace(b, phase=phase) for b in layout.buffers.values()]
        passes = -(-plan.workload.prompt // chunk)  # of a prefill, which need not reach its steady state
        lines = {tokens: simulate(program, self.machine, STEPS if tokens == 1 else min(STEPS, passes))
                 for tokens, program in programs.items()}
        plan = replace(plan, buffers=tuple(buffers), gemm=tuple(choices), prediction=_prediction(plan, programs, lines))
        self._programs = {(id(plan), tokens): program for tokens, program in programs.items()}
        self._planned = plan  # keeps the id valid
        Dump(self.switches.dump, "").plan(plan)
        return plan

    @no_collection()
    def program(self, plan: Plan, tokens: int) -> Program:
        """The verified Program of a step over `tokens` tokens per sequence."""
        found = self._programs.get((id(plan), tokens))
        if found is None:
            bare = _kept(plan, tokens)
            try:
                found, _, _ = self._lowered(bare, tokens)
            except _LayersDiffer:
                found, _, _ = self._lowered(bare, tokens)
            if plan is self._planned:
                self._programs[id(plan), tokens] = found
        return found

    def growth(self, plan: Plan) -> Program | None:
        """The verified Program that runs between prefill and decoding where the cache is then given more room."""
        if not plan.lends:
            return None
        narrow, wide = ([b for b in plan.buffers if b.kind == "cache" and b.phase == phase]
                        for phase in ("prefill", "decode"))
        lengths = plan.workload.prompt, plan.workload.context
        program = grow_cache(narrow, wide, self._cache_rows, lengths, plan.arenas)
        if self.switches.verify:
            verify_program(program, {"device": plan.budget.device, "host": plan.budget.host or None})
        return program

    def _choose_gemms(self, gm: fx.GraphModule, known: tuple[GemmChoice, ...]) -> list[GemmChoice]:
        shapes = {shape for graph in (gm, *block_graphs(gm)) for node in graph.graph.nodes
                  if (shape := product_shape(node))}
        shapes -= {(c.dtype, c.m, c.n, c.k) for c in known}
        return [GemmChoice(*shape, impl=self._best_gemm(shape)) for shape in sorted(shapes)]

    def _lowered(self, plan: Plan, tokens: int) -> tuple[Program, Layout, tuple[GemmChoice, ...]]:
        """Run all passes on a fresh graph, lower it and prove the Program. Shapes the plan's table of matrix products
        does not hold yet are chosen from the machine's measurements."""
        self.need(tokens)
        graph_of = self.source.prefill if plan.lends and self.source.prefill is not None else self.source.step
        gm = self._steps.pop(tokens, None) or graph_of(tokens)
        if not repeats(gm, self._layouts[tokens]):
            self._each_layer = True
            self._needs.clear()
            raise _LayersDiffer
        gm.meta[META] = self._layouts[tokens]
        dump = Dump(self.switches.dump, f"{tokens}_tokens")
        bisection = Bisection(gm) if self.switches.bisect else None
        for run_pass, _ in PASSES:
            name = run_pass.__name__
            if name in self.switches.skip:
                continue
            if run_pass is select_gemm:
                plan = replace(plan, gemm=(*plan.gemm, *self._choose_gemms(gm, plan.gemm)))
            dump.before(gm, name)
            for graph in (gm,) if run_pass in WHOLE_STEP else (gm, *block_graphs(gm)):
                run_pass(graph, plan)
            dump.after(gm, name)
            if bisection is not None:
                bisection.compare(gm, name)
            if name == self.switches.stop_after:
                raise StoppedAfter(f"FOREBAY_STOP_AFTER={name}: stopped there as asked, nothing was lowered")
        draft = lower(gm, plan, self.source.files, self._workspace, f"step of {tokens} tokens")
        for order_copies, _ in DRAFT_PASSES:
            if order_copies.__name__ not in self.switches.skip:
                order_copies(draft, plan)
            if order_copies.__name__ == self.switches.stop_after:
                raise StoppedAfter(f"FOREBAY_STOP_AFTER={self.switches.stop_after}: stopped there as asked")
        program = place_copies(draft, plan)
        dump.program(program)
        if self.switches.verify:
            verify_program(program, {"device": plan.budget.device, "host": plan.budget.host or None})
        return program, gm.meta["forebay"], plan.gemm


def _kept(plan: Plan, tokens: int) -> Plan:
    """`plan` with only those buffers that live throughout steps over `tokens` tokens: no activations, one cache."""
    kept = plan.buffers_of("decode" if tokens == 1 else "prefill")
    return replace(plan, buffers=tuple(b for b in kept if b.phase == "all" or b.kind == "cache"))


class _LayersDiffer(RuntimeError):
    """Equal layers do not find their inputs in the same places."""


class StoppedAfter(RuntimeError):
    """FOREBAY_STOP_AFTER stopped the pipeline on purpose."""


def _nowhere(node: fx.Node, result: int = 0) -> TensorRef:
    """A reference with a value's layout, before it has an address."""
    value = values_of(node)[result]
    return TensorRef("device", 0, str(value.dtype)[6:], tuple(value.shape), tuple(value.stride()), "")


def _prediction(plan: Plan, programs: Mapping[int, Program], lines: Mapping[int, Timeline]) -> Prediction:
    chunk = plan.schedule.prefill_chunk
    passes = -(-plan.workload.prompt // chunk)
    workspace = max(p.workspace_nbytes() for p in programs.values())
    peak = {tier: nbytes + (workspace if tier == "device" else 0) for tier, nbytes in plan.arenas.items()}
    return Prediction(
        prefill_time_s=passes * lines[chunk].time_s, decode_time_s=lines[1].time_s, busy_time_s=lines[1].busy_time_s,
        streamed_nbytes=programs[1].moved_nbytes(), peak_nbytes=peak, bottleneck=lines[1].bottleneck)
