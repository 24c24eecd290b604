"""From captured graphs to verified Programs: the order of everything, in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from forebay.kernels import attention, linear, rms_norm, rotary
from forebay.passes.allocate_buffers import allocate_buffers, plan_activations
from forebay.passes.fuse_rms_norm import fuse_rms_norm
from forebay.passes.fuse_rotary import fuse_rotary
from forebay.passes.hoist_prefetch import hoist_prefetch
from forebay.passes.insert_transfers import insert_transfers
from forebay.passes.launches import Launches
from forebay.passes.lower import lower
from forebay.passes.select_gemm import product_shape, select_gemm
from forebay.rewriter.bisect import Bisection
from forebay.rewriter.collection import no_collection
from forebay.rewriter.dump import Dump
from forebay.rewriter.facts import cache_buffers, weight_uses
from forebay.rewriter.graph import META, Gemm, Layout, values_of
from forebay.rewriter.machine import Machine
from forebay.rewriter.plan import Budget, GemmChoice, Plan, Prediction, Workload
from forebay.rewriter.planner import Facts, PhaseNeed, Wishes, make_plan, smallest_budget
from forebay.rewriter.program import FileSlice, Program, TensorRef
from forebay.rewriter.simulate import Timeline, simulate
from forebay.rewriter.switches import SwitchError, Switches
from forebay.rewriter.verify import verify_program

# Each pass with the reason why it stands where it does.
PASSES: tuple[tuple[Callable[[fx.GraphModule, Plan], None], str], ...] = (
    (insert_transfers, "first: it splits matrix products into tiles, and every later pass must see the tiles"),
    (hoist_prefetch, "after insert_transfers, whose fetches it moves; before addresses, which depend on the order"),
    (select_gemm, "after tiling, because the choice depends on the tile's shape"),
    (allocate_buffers, "last: lifetimes are exact only when the order of nodes is final"),
)
# On captured graphs, once per kind of layer, before there is a plan: what they fold, the planner never sees.
BLOCK_PASSES: tuple[tuple[Callable[[fx.GraphModule], None], str], ...] = (
    (fuse_rms_norm, "first: the norms stand between everything else, and no other pattern contains one"),
    (fuse_rotary, "queries and keys, before attention reads them"),
)
OPERATORS = (attention, linear, rms_norm, rotary)  # imported, so that torch knows the operators passes put in
OPTIONAL = ("hoist_prefetch", "select_gemm", "fuse_rms_norm", "fuse_rotary")  # without: slower, not wrong

FlatGraph = Callable[[int], fx.GraphModule]  # tokens per sequence in one step -> a fresh flat graph


@dataclass
class Source:
    """What a model is to the pipeline, whatever captured it.

    `flat(tokens)` builds a new flat concrete graph for steps of that many tokens per sequence, `sample(tokens)` (if it
    is given) one with fewer layers and the same peak of activations; `files` tells where the
    weights lie on disk; `constants` are small tensors that always stay in memory.
    """

    fingerprint: str
    flat: FlatGraph
    files: Mapping[str, FileSlice]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    host_hop: bool = False
    weight_tier: str = "disk"
    sample: FlatGraph | None = None


class Pipeline:
    """Plans and lowers one `Source` for one workload; programs are made when first asked for and kept."""

    def __init__(self, source: Source, workload: Workload, machine: Machine, switches: Switches) -> None:
        known = [p.__name__ for p, _ in PASSES]  # those that run on flat graphs
        for name in switches.skip:
            if name not in OPTIONAL:
                raise SwitchError(f"FOREBAY_SKIP: {name!r} cannot be skipped; those that can: {', '.join(OPTIONAL)}")
        if switches.stop_after and switches.stop_after not in known:
            raise SwitchError(f"FOREBAY_STOP_AFTER: no pass {switches.stop_after!r}; they are {', '.join(known)}")
        self.source, self.workload, self.machine, self.switches = source, workload, machine, switches
        self._needs: dict[int, PhaseNeed] = {}
        self._samples: dict[int, fx.GraphModule] = {}
        self._programs: dict[tuple[int, int], Program] = {}
        self._planned: Plan | None = None
        decode = source.flat(1)
        self._flats: dict[int, fx.GraphModule] = {1: decode}
        self.facts = Facts(
            source.fingerprint, weight_uses(decode, set(source.constants)),
            {name: t.numel() * t.element_size() for name, t in source.constants.items()}, cache_buffers(decode),
            self.need, source.weight_tier, source.host_hop)

    def need(self, tokens: int) -> PhaseNeed:
        """Activation and workspace bytes of a step over `tokens` tokens per sequence."""
        found = self._needs.get(tokens)
        if found is None:
            flat = (self.source.sample or self.source.flat)(tokens)
            layout = flat.meta["forebay"] = plan_activations(flat, not self.switches.no_reuse)
            self._samples[tokens] = flat
            found = self._needs[tokens] = PhaseNeed(layout.height, self._most_workspace(flat))
        return found

    def _workspace(self, node: fx.Node) -> int:
        """Transient bytes that one of our own operators takes beside its operands."""
        shape = product_shape(node)
        if shape is not None:
            mark = node.meta.get(META)
            impl = mark.impl if isinstance(mark, Gemm) else self._best_gemm(shape)
            dtype, m, n, k = shape
            return linear.scratch_nbytes(impl, getattr(torch, dtype), m, n, k)
        return _attention_nbytes(node) if str(node.target) == "forebay.attention.default" else 0

    def _best_gemm(self, shape: tuple[str, int, int, int]) -> str:
        """The fastest implementation measured on this machine; where not all were measured, the kernels' own choice."""
        dtype, m, n, k = shape
        measured = {point.impl for point in self.machine.gemm if point.dtype == dtype}
        if measured >= set(linear.implementations(getattr(torch, dtype))):
            return self.machine.best_gemm(dtype, m, n, k)
        return linear.default_choice(getattr(torch, dtype), m, n, k)

    def _most_workspace(self, flat: fx.GraphModule) -> int:
        """The largest transient memory of any node of a flat graph."""
        launches = Launches(_nowhere, self._workspace)
        nodes = [n for n in flat.graph.nodes if n.op == "call_function" and n.meta.get("alias_of") is None]
        return max((launch.workspace_nbytes for n in nodes for launch in launches.of(n)), default=0)

    def plan(self, budget: Budget, wishes: Wishes | None = None) -> Plan:
        """The plan for `budget`, with its table of matrix products and its prediction filled in."""
        wishes = replace(wishes or Wishes(), reuse=not self.switches.no_reuse)
        with no_collection():
            return self.complete(make_plan(self.facts, budget, self.workload, wishes, self.machine.name))

    def smallest_budget(self, wishes: Wishes | None = None) -> int:
        """The least device budget in bytes that a plan exists for."""
        return smallest_budget(self.facts, self.workload, wishes or Wishes())[0]

    def complete(self, plan: Plan) -> Plan:
        """`plan` with implementations chosen, activations placed and times predicted, from its own Programs."""
        chunk = plan.schedule.prefill_chunk
        programs, buffers, choices = {}, list(plan.buffers), []
        for tokens in sorted({1, chunk}):
            programs[tokens], layout, chosen = self._lowered(plan, tokens)
            choices += [c for c in chosen if c not in choices]
            phase = "decode" if tokens == 1 else "prefill"
            buffers += [replace(b, phase=phase) for b in layout.buffers.values()]
        lines = {tokens: simulate(program, self.machine) for tokens, program in programs.items()}
        plan = replace(plan, buffers=tuple(buffers), gemm=tuple(choices), prediction=_prediction(plan, programs, lines))
        self._programs = {(id(plan), tokens): program for tokens, program in programs.items()}
        self._planned = plan  # keeps the id valid
        Dump(self.switches.dump, "").plan(plan)
        return plan

    def program(self, plan: Plan, tokens: int) -> Program:
        """The verified Program of a step over `tokens` tokens per sequence."""
        found = self._programs.get((id(plan), tokens))
        if found is None:
            bare = replace(plan, buffers=tuple(b for b in plan.buffers if b.phase == "all"))
            found, _, _ = self._lowered(bare, tokens)
            if plan is self._planned:
                self._programs[id(plan), tokens] = found
        return found

    def _choose_gemms(self, gm: fx.GraphModule, known: tuple[GemmChoice, ...]) -> list[GemmChoice]:
        shapes = {shape for node in gm.graph.nodes if (shape := product_shape(node))}
        shapes -= {(c.dtype, c.m, c.n, c.k) for c in known}
        return [GemmChoice(*shape, impl=self._best_gemm(shape)) for shape in sorted(shapes)]

    def _lowered(self, plan: Plan, tokens: int) -> tuple[Program, Layout, tuple[GemmChoice, ...]]:
        """Run all passes on a fresh graph, lower it and prove the Program. Shapes the plan's table of matrix products
        does not hold yet are chosen from the machine's measurements."""
        gm = self._flats.pop(tokens, None) or self.source.flat(tokens)
        if self.source.sample is not None:
            self.need(tokens)
            gm.meta["sample"] = self._samples[tokens]
        dump = Dump(self.switches.dump, f"{tokens}_tokens")
        bisection = Bisection(gm) if self.switches.bisect else None
        for run_pass, _ in PASSES:
            name = run_pass.__name__
            if name in self.switches.skip:
                continue
            if run_pass is select_gemm:
                plan = replace(plan, gemm=(*plan.gemm, *self._choose_gemms(gm, plan.gemm)))
            dump.before(gm, name)
            run_pass(gm, plan)
            dump.after(gm, name)
            if bisection is not None:
                bisection.compare(gm, name)
            if name == self.switches.stop_after:
                raise StoppedAfter(f"FOREBAY_STOP_AFTER={name}: stopped there as asked, nothing was lowered")
        program = lower(gm, plan, self.source.files, self._workspace, f"step of {tokens} tokens")
        dump.program(program)
        if self.switches.verify:
            verify_program(program, {"device": plan.budget.device, "host": plan.budget.host or None})
        return program, gm.meta["forebay"], plan.gemm


class StoppedAfter(RuntimeError):
    """FOREBAY_STOP_AFTER stopped the pipeline on purpose."""


def _attention_nbytes(node: fx.Node) -> int:
    q, k = node.args[0].meta["val"], node.args[1].meta["val"]  # type: ignore[union-attr]
    batch, heads, tokens, width = q.shape
    softcap = float(node.args[6]) if len(node.args) > 6 else 0.0  # type: ignore[arg-type]
    return attention.workspace_nbytes(batch, heads, k.shape[1], tokens, k.shape[2], width, q.dtype, softcap)


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
        streamed_nbytes=programs[1].streamed_nbytes(), peak_nbytes=peak, bottleneck=lines[1].bottleneck)
