"""Attention over the batch: what stands around a layer's attention each rank computes for sequences of its own.

A captured graph's symbol for the batch is, in a rank's graph, the number of its own sequences, so that all of that
stays as it was captured; values of all sequences have as many times more.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from forebay.passes.shard.collectives import Collectives
from forebay.passes.shard.demand import caches_of, over_cache, product_of
from forebay.passes.shard.split import ShardError
from forebay.rewriter.ir.graph import copy_node
from forebay.rewriter.ir.share import Ranges, RankShare

aten = torch.ops.aten


class SequenceParallelRegion:
    """The `nodes` of a layer that ranks compute for their own sequences: from products to attention, and behind it up
    to the next product. They read of products `entering` alone, which nobody else reads. ShardError else."""

    def __init__(self, gm: fx.GraphModule | None = None) -> None:
        self.nodes: set[fx.Node] = set()
        self.entering: list[fx.Node] = []
        self.caches: set[fx.Node] = set()
        if gm is None:
            return
        made: set[fx.Node] = set()  # by products of the layer
        operands: list[fx.Node] = []
        for node in gm.graph.nodes:
            given, read = over_cache(node), set(node.all_input_nodes)
            if product_of(node) is not None:
                made.add(node)
                continue
            operands += given
            self.caches.update(caches_of(node))
            if given or self.nodes & read:
                self.nodes.add(node)
            if made & read:
                made.add(node)
        while operands:
            node = operands.pop()
            if node in made and node not in self.nodes and product_of(node) is None:
                self.nodes.add(node)
                operands += node.all_input_nodes
        self.nodes.discard(gm.graph.output_node())
        products = (node for node in gm.graph.nodes if product_of(node) is not None)
        self.entering = [node for node in products if self.nodes & set(node.users)]
        for node in self.entering:
            other = next((user for user in node.users if user not in self.nodes), None)
            if other is not None:
                raise ShardError(f"{node.name} is read by attention and by {other.name}, which is computed for all "
                                 "sequences; take attention=heads")


class AllSequences:
    """Values of a captured graph as they are for all of `parts` times the sequences that its symbol stands for."""

    def __init__(self, gm: fx.GraphModule, parts: int) -> None:
        self.parts, size = parts, next(iter(gm.graph.find_nodes(op="placeholder"))).meta["val"].shape[0]
        self.symbol = None if isinstance(size, int) else size.node.expr

    def counts(self, size: Any) -> bool:
        """Return whether a size is that of some number of sequences."""
        return isinstance(size, torch.SymInt) and self.symbol in size.node.expr.free_symbols

    def of(self, value: Any) -> Any:
        """A node's value, for all sequences."""
        if self.parts == 1:
            return value
        if isinstance(value, torch.SymInt):
            return self._size(value)
        return pytree.tree_map_only(torch.Tensor, lambda t: t.new_empty_strided(
            [self._size(n) for n in t.shape], [self._size(n) for n in t.stride()]), value)

    def _size(self, size: Any) -> Any:
        return size * self.parts if self.counts(size) else size


class OwnSequences:
    """Makes the nodes of `apart` in a rank's graph; `env` has the new nodes of all others."""

    def __init__(self, apart: SequenceParallelRegion, all_sequences: AllSequences, share: RankShare,
                 exchange: Collectives, graph: fx.Graph, env: dict[fx.Node, fx.Node]) -> None:
        self.apart, self.all, self.share, self.exchange = apart, all_sequences, share, exchange
        self.graph, self.env = graph, env
        self.own: dict[fx.Node, fx.Node] = {}  # of nodes that are computed for all, what these sequences have of them
        self._bounds: tuple[fx.Node, fx.Node, fx.Node] | None = None

    def entered(self, products: Sequence[fx.Node], parts: Sequence[Sequence[Ranges]]) -> None:
        """Have all features of products for these sequences, of which each rank has `parts` for all of them."""
        made = self.exchange.of_sequences([self.env[n] for n in products], parts, products[0])
        self.own.update(zip(products, made, strict=True))

    def computed(self, node: fx.Node) -> fx.Node:
        """A node of `apart`."""
        return copy_node(self.graph, node, {operand: self._operand(operand) for operand in node.all_input_nodes})

    def left(self, node: fx.Node, parts: Iterable[Ranges]) -> fx.Node:
        """Return this rank's part of the features for all sequences, of a value for these sequences."""
        return self.exchange.of_features(self.env[node], list(parts), node)

    def _operand(self, node: fx.Node) -> fx.Node:
        value = node.meta.get("val")
        if node in self.apart.nodes or node in self.apart.caches:
            return self.env[node]
        if node not in self.own:
            if isinstance(value, torch.SymInt) and self.all.counts(value):
                self.own[node] = self._number(node, value)
            elif isinstance(value, torch.Tensor) and any(map(self.all.counts, value.shape)):
                self.own[node] = self._rows(node, value)
            else:
                return self.env[node]
        return self.own[node]

    def _number(self, node: fx.Node, value: torch.SymInt) -> fx.Node:
        if value.node.expr == self.all.symbol:
            return self._range(node)[1]
        if node.target is aten.sym_size.int:
            raise ShardError(f"{node.name} counts tokens of all sequences; take attention=heads")
        return copy_node(self.graph, node, {operand: self._operand(operand) for operand in node.all_input_nodes},
                         f"{node.name}_own")

    def _rows(self, node: fx.Node, value: torch.Tensor) -> fx.Node:
        """The rows of a value that are these sequences'."""
        if value.shape[0].node.expr != self.all.symbol or any(map(self.all.counts, value.shape[1:])):  # type: ignore[attr-defined]
            raise ShardError(f"{node.name} has sequences in other dimensions than the first; take attention=heads")
        first, _, end = self._range(node)
        rows = self.graph.create_node("call_function", aten.slice.Tensor, (self.env[node], 0, first, end))
        rows.meta.update(node.meta)
        return rows

    def _range(self, like: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
        """The first of these sequences, how many there are, and the first behind them."""
        if self._bounds is None:
            source = next(iter(self.graph.find_nodes(op="placeholder")))
            call = self.exchange.call
            every = call(aten.sym_size.int, (source, 0), like)
            count = call(operator.floordiv, (every, self.all.parts), like)
            at = self.share.index(self.share.axes)
            self._bounds = (call(operator.mul, (count, at), like), count, call(operator.mul, (count, at + 1), like))
        return self._bounds
