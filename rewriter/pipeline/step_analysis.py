"""Needs of steps of each size besides weights and cache: activations, workspace, matmuls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch import fx

from forebay.kernels import operators
from forebay.kernels.operator import Product
from forebay.kernels.products.linear.joined import MOST_COLUMNS
from forebay.passes.lower.launches import Launches
from forebay.passes.place.allocate_buffers import plan_activations
from forebay.rewriter.capture.concretise import inline_blocks
from forebay.rewriter.capture.step_graphs import StepGraphs
from forebay.rewriter.ir.graph import META, Gemm, Layout, is_collective
from forebay.rewriter.ir.products import Shape, product_shape
from forebay.rewriter.ir.program import Launch
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.planning.best_product import best_product
from forebay.rewriter.planning.check_plan import refuse_launches
from forebay.rewriter.planning.launch_memory import phase_workspace, product_launch, unplaced, with_draw
from forebay.rewriter.planning.model_needs import PhaseNeed
from forebay.rewriter.planning.product_shapes import ProductUse, joined_shapes, product_uses


@dataclass(frozen=True)
class StepAnalysis:
    """The steps of a model's graphs on a machine, each size analysed once. With `each_layer` activations are laid out
    layer by layer, where equal layers cannot share addresses; else from few layers, which stand for all."""

    graphs: StepGraphs
    machine: Machine
    reuse: bool = True  # whether values share memory once dead
    each_layer: bool = False
    needs: dict[int, PhaseNeed] = field(default_factory=dict)  # by tokens per sequence of a step
    takers: dict[int, list[Launch]] = field(default_factory=dict)  # its launches, for what they take

    def serves(self, graphs: StepGraphs) -> bool:
        """Return whether steps of `graphs`, which differ in the shares of their caches at most, take what these take:
        they do unless the host attends in one of both, as shares change nothing of a turn."""
        attends = graphs.batching.cache.cpu_attention
        return not self.each_layer and attends == self.graphs.batching.cache.cpu_attention

    def need(self, tokens: int) -> PhaseNeed:
        """Return the memory of a step over `tokens` tokens besides weights and cache; its workspace also covers decode
        steps."""
        known = self.needs.get(tokens)
        if known is None:
            if self.graphs.sample is not None and not self.each_layer:
                flat, representatives = self.graphs.sample(tokens)
            else:
                flat, representatives = inline_blocks(self.graphs.step(tokens)), {}
            batching = self.graphs.batching.of_step(tokens)
            layout = replace(plan_activations(flat, self.reuse, batching), representatives=representatives)
            launches = self._launches(flat, uses := (*product_uses(flat), *self._joined(flat)))
            refuse_launches(launches, self.machine.kind)
            self.takers[tokens] = with_draw(launches, self.machine.kind.draw_nbytes(self.graphs.words))
            if tokens > 1:
                self.need(1)
            taken, *parts = phase_workspace(self.takers, tokens, self.graphs.batching.is_prefill(tokens))
            known = self.needs[tokens] = PhaseNeed(layout.height, taken, layout, uses, *parts)
        return known

    def layout(self, tokens: int) -> Layout:
        """The layout of a step's activations, with addresses from 0 on."""
        layout = self.need(tokens).layout
        assert layout is not None
        return layout

    def best_gemm(self, shape: Shape, most: int | None = None) -> str:
        """Choose the implementation of a matmul; on a CPU one with at most `most` bytes of workspace, if there is
        one."""
        product = Product(*shape)
        if self.machine.kind.on_host_cores:
            return best_product(product, self.machine, self.graphs.activations, most)
        choice = operators.product_with(product.weight).implementations
        assert choice is not None
        return choice.default[self.machine.kind.kernels](product, self.machine.device_kind, self.graphs.dtype)

    def _joined(self, flat: fx.GraphModule) -> Iterable[ProductUse]:
        """The products of a flat graph that the device's kernels compute together. Each weight takes whole tiles."""
        if not self.machine.kind.joins:
            return
        for shape, rows in joined_shapes(flat).items():
            choice = operators.product_with(shape[0]).implementations
            if choice is not None and choice.joins(self.best_gemm(shape)):
                dtype, m, _, k = shape
                yield ProductUse(shape, "", "", (dtype, m, sum(-(-n // MOST_COLUMNS) * MOST_COLUMNS for n in rows), k))

    def _launches(self, flat: fx.GraphModule, uses: Iterable[ProductUse]) -> list[Launch]:
        """The launches of a flat graph, of equal layers once, and the products of weights that may come in tiles, as
        our own operator."""
        launches = Launches(unplaced, self.machine.kind.with_memory)
        calls = (n for n in _one_of_equals(flat) if n.meta.get("alias_of") is None or is_collective(n))
        nodes = list[fx.Node]()
        for node in calls:
            shape = product_shape(node)
            if shape is not None:
                node.meta[META] = Gemm(self.best_gemm(shape))
            nodes.append(node)
        tiled = (product_launch(Product(*u.tiled), self.best_gemm(u.shape or u.tiled), self.machine.kind,
                                self.graphs.dtype)
                 for u in uses if u.shape is None or (not u.cut and u.shape != u.tiled))
        return [*tiled, *(launch for n in nodes for launch in launches.of(n))]


def _one_of_equals(flat: fx.GraphModule) -> Iterable[fx.Node]:
    """The calls of a flat graph. Of layers that share a block graph only the first counts."""
    known = set[tuple[str, str]]()
    for node in flat.graph.nodes:
        if node.op != "call_function":
            continue
        key = node.meta.get("block", ""), node.name.removeprefix(f"layer{node.meta.get('layer')}_")
        if key not in known:
            known.add(key)
            yield node
