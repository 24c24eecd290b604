"""The step of a prefill for which weights are gathered: ranks along gathered axes compute sequences of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from forebay.passes.shard.cuts import Cuts
from forebay.passes.shard.divided import Divided
from forebay.passes.shard.sequences import AllSequences, SequenceParallelRegion
from forebay.passes.shard.split import ShardError, Split
from forebay.rewriter.ir.graph import META
from forebay.rewriter.ir.share import RankShare

aten = torch.ops.aten


class GatheredStep(Divided):
    """A step graph whose layers `share.prefilling` computes: of what it is given a rank takes its sequences, and before
    the head, whose rows all ranks have parts of, it gathers the last hidden states of all."""

    def __init__(self, gm: fx.GraphModule, share: RankShare, wanted: Mapping[fx.Node, Split], head: fx.Node | None
                 ) -> None:
        if head is None:
            raise ShardError("this model has no head after its layers: weights cannot be gathered for its prompts")
        whole = replace(share, layout="1d", gathered=())
        super().__init__(gm, whole, {share.rank: wanted}, head, False, SequenceParallelRegion())
        self.over = share.gathered
        self.others = tuple(i for i in range(len(share.shape)) if i not in self.over)
        self.every = self.all_sequences
        self.all_sequences = AllSequences(gm, share.size(self.others))

    def run(self) -> Cuts:
        self._cut_inputs()
        inputs = [node for node in self.gm.graph.find_nodes(op="placeholder")]
        for node in inputs:
            self._emit(node)
        for node in inputs:
            if node.meta.get(META) is None:
                self.env[node].meta["val"] = self.every.of(node.meta["val"])
                self.env[node] = self._own(self.env[node])
        return super().run()

    def _own(self, value: fx.Node) -> fx.Node:
        """The sequences that this rank computes, of those of all."""
        rows, *sizes = self.exchange.sizes(value, value)
        each = self.exchange.over(rows, self.share.beside, value)
        apart = self.call(aten.view.default, (value, [*self.share.shape, each, *sizes]), value)
        for axis in sorted(self.over, reverse=True):
            apart = self.call(aten.select.int, (apart, axis, self.share.place[axis]), value)
        own = self.exchange.times(each, self.share.size(self.others), value)
        return self.call(aten.reshape.default, (apart, [own, *sizes]), value)

    def _product(self, node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None, transposed: bool) -> None:
        if node is not self.head:
            super()._product(node, x, weight, bias, transposed)
            return
        self.all_sequences = self.every
        self.env[node] = self._headed(node, self._made(node, self._everybody(self.env[x], node), ()))

    def _everybody(self, value: fx.Node, like: fx.Node) -> fx.Node:
        """The rows of all ranks, one sequence behind the other."""
        rows, *sizes = self.exchange.sizes(value, like)
        shape, each = self.share.shape, self.exchange.over(rows, self.share.size(self.others), like)
        order = [*self.over, *self.others]  # of the axes, as they lie now
        every = self.exchange.every(value, self.over, like)
        apart = self.call(aten.view.default, (every, [*(shape[i] for i in order), each, *sizes]), like)
        axes = len(order)
        if order != sorted(order):
            back = [*(order.index(i) for i in range(axes)), *range(axes, axes + 1 + len(sizes))]
            apart = self.call(aten.permute.default, (apart, back), like)
        made = [self.exchange.times(each, self.share.beside, like), *sizes]
        return self.call(aten.reshape.default, (apart, made), like)
