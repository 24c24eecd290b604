"""Rewrite the graphs of a model into those of one rank, which computes a part of every layer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from forebay.passes.place.specialise_blocks import block_graphs
from forebay.passes.shard.collectives import Collectives
from forebay.passes.shard.demand import (
    HEADS_BEHIND,
    ROW_WISE,
    Demand,
    aligned_operands,
    caches_of,
    cat_dim,
    is_pointwise,
    over_cache,
    product_of,
    slice_of,
    sliced_dim,
)
from forebay.passes.shard.split import (
    SPLITS,
    VIEWS,
    ShardError,
    Split,
    moved,
    moves,
    shape_of,
    sizes_of,
    split_dim,
)
from forebay.rewriter.ir.graph import META, CacheInput, WeightInput, copy_node, weight_name
from forebay.rewriter.ir.share import Ranges, RankShare, WeightCut, count, ranges

aten = torch.ops.aten
ROWS = ".rows"  # ends the name of a weight that is rows of another, which is read whole as well


@dataclass
class Cuts:
    """What a graph's weights and caches are on a rank: cuts by the weight's name in the graph, heads by the cache's
    placeholder; `rows` are further placeholders, which are rows of another one's weight."""

    weights: dict[str, WeightCut] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)


class Divided:
    """One graph on its way to a rank's: `split` says how a rank has each of its values, `run` makes the new graph."""

    def __init__(self, gm: fx.GraphModule, share: RankShare, wanted: Mapping[fx.Node, Split], head: fx.Node | None
                 ) -> None:
        self.gm, self.share, self.wanted, self.head = gm, share, wanted, head
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.split: dict[fx.Node, Split | None] = {}
        self.cuts = Cuts()
        self.exchange = Collectives(self.call, share)

    def run(self) -> Cuts:
        self._cut_inputs()
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self._input(node)
            elif node.op in ("output", "call_module"):
                whole = {operand: self._whole(operand) for operand in node.all_input_nodes}
                self.env[node] = copy_node(self.graph, node, whole)
            else:
                self._operator(node)
        self.gm.graph = self.graph
        return self.cuts

    # -- weights and caches

    def _cut_inputs(self) -> None:
        """What of weights and caches a rank has, before any node is made: placeholders come first."""
        for node in self.gm.graph.nodes:
            self.split[node] = self._place(node)
            product = product_of(node)
            if product is not None:
                x, weight, bias, transposed = product
                rows = self.wanted.get(node)
                if rows is not None:
                    self._cut(weight, 1 if transposed else 0, rows.held)
                    if bias is not None and weight_name(bias) is not None:
                        self._cut(bias, 0, rows.held)
                elif (into := self.split[x]) is not None:
                    self._cut(weight, 0 if transposed else 1, into.held)
            for cache in caches_of(node):
                for operand in over_cache(node) if node.meta["val"] is None else ():
                    placed = self.split[operand]
                    self.cuts.heads[cache.name] = shape_of(cache)[1] if placed is None else placed.count

    def _cut(self, weight: fx.Node, dim: int, held: Ranges) -> None:
        name = weight_name(weight)
        assert name is not None
        cut = ((dim, held),)
        others = [user for user in weight.users if product_of(user) is None and user.op != "call_module"]
        if others:  # a table of tokens that is the head too: the head reads rows of its own
            self.cuts.rows[f"{weight.name}_rows"] = weight.name
            name += ROWS
        if self.cuts.weights.setdefault(name, cut) != cut:
            raise ShardError(f"{name} is read by two products that divide it in two ways")

    def _input(self, node: fx.Node) -> None:
        new = self.env[node] = copy_node(self.graph, node, {})
        mark, value = node.meta.get(META), node.meta["val"]
        if node.name in self.cuts.heads:
            new.meta["val"] = value.new_empty((value.shape[0], self.cuts.heads[node.name], *value.shape[2:]))
        elif isinstance(mark, WeightInput):
            if f"{node.name}_rows" in self.cuts.rows:
                self._rows_of(node, mark)
            new.meta["val"] = self._part(value, self.cuts.weights.get(mark.name, ()))

    def _rows_of(self, node: fx.Node, mark: WeightInput) -> None:
        name = mark.name + ROWS
        rows = self.graph.create_node("placeholder", f"{node.name}_rows", name=f"{node.name}_rows")
        rows.meta.update(node.meta, val=self._part(node.meta["val"], self.cuts.weights[name]),
                         **{META: replace(mark, name=name)})
        self.head_rows = rows

    @staticmethod
    def _part(value: torch.Tensor, cut: WeightCut) -> torch.Tensor:
        shape = list(value.shape)
        for dim, held in cut:
            shape[dim] = count(held)
        return value.new_empty(shape)

    # -- how values are split

    def _place(self, node: fx.Node) -> Split | None:
        """How a rank has a value; None where it has all of it."""
        if node.op != "call_function":
            return None
        product = product_of(node)
        if product is not None:
            return None if node is self.head else self.wanted.get(node)  # the head's parts are gathered at once
        given = over_cache(node)
        if given:
            split = self.split[given[0]]
            return None if split is None or node.meta["val"] is None else replace(split, dim=HEADS_BEHIND)
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        split = None if source is None else self.split[source]
        if is_pointwise(node):
            return self._of_operands(node)
        if split is None and node.target is not aten.cat.default:
            return None
        return self._told(self._passed_on(node, split))

    @staticmethod
    def _told(split: Split | None) -> Split | None:
        return None if split is None or split.count == split.size else split

    def _of_operands(self, node: fx.Node) -> Split | None:
        value = node.meta["val"]
        found: Split | None = None
        for operand in node.all_input_nodes:
            split = self.split[operand]
            if split is not None:
                dim = split.dim + value.dim() - operand.meta["val"].dim()
                mine = replace(split, dim=dim)
                if found not in (None, mine):
                    raise ShardError(f"{node.name} meets values that ranks divide in two ways: {found} and {mine}")
                found = mine
        return found

    def _passed_on(self, node: fx.Node, split: Split | None) -> Split | None:
        target = node.target
        if target is aten.cat.default:
            found = {part for n in node.all_input_nodes if (part := self.split[n]) is not None}
            if len(found) > 1 or any(part.dim == cat_dim(node) for part in found):
                raise ShardError(f"{node.name} puts parts together that ranks divide in two ways")
            return next(iter(found), None)
        assert split is not None
        if target in SPLITS:
            return split
        if target is operator.getitem:
            parts = node.args[0]
            assert isinstance(parts, fx.Node)
            if split_dim(parts) != split.dim:
                return split
            begins, at = sizes_of(parts), node.args[1]
            return split.among(begins[at], begins[at + 1] - begins[at])  # type: ignore[index, operator]
        if target is aten.slice.Tensor and sliced_dim(node) == split.dim:
            return split.among(*slice_of(node))
        if moves(node):
            return moved(node, split)
        if target in ROW_WISE and split.dim != len(shape_of(node.args[0])) - 1:  # type: ignore[arg-type]
            return split
        if target is aten.sym_size.int and node.args[1] % len(shape_of(node.args[0])) != split.dim:  # type: ignore[operator, arg-type]
            return None
        raise ShardError(f"{node.name}: {target} is not known to work on a part of its operands")

    # -- the new graph

    def call(self, target: Callable, args: tuple, like: fx.Node, kwargs: dict[str, Any] | None = None,
             name: str | None = None) -> fx.Node:
        """A node with the value that it gives, in the place of `like`."""
        new = self.graph.create_node("call_function", target, args, kwargs or {}, name=name)
        given, named = map_aggregate((new.args, new.kwargs),  # type: ignore[arg-type, misc]
                                     lambda v: v.meta["val"] if isinstance(v, fx.Node) else v)
        new.meta.update({key: value for key, value in like.meta.items() if key != META}, val=target(*given, **named))
        return new

    def _operator(self, node: fx.Node) -> None:
        split, product = self.split[node], product_of(node)
        if product is not None:
            self.env[node] = self._product(node, *product)
            return
        if split is None and all(self.split[operand] is None for operand in node.all_input_nodes):
            self.env[node] = copy_node(self.graph, node, self.env)
            return
        operands = {operand: self._operand(node, operand) for operand in node.all_input_nodes}
        given: Any = map_aggregate((node.args, node.kwargs), lambda n: operands[n] if isinstance(n, fx.Node) else n)  # type: ignore[arg-type]
        args: list[Any] = list(given[0])
        kwargs: dict[str, Any] = dict(given[1])
        target = node.target
        source = node.args[0] if node.args else None
        if split is not None and (target in VIEWS or target is aten.expand.default):
            sizes = list(args[1])
            if isinstance(sizes[split.dim], int) and sizes[split.dim] > 0:
                sizes[split.dim] = split.count
            args[1] = sizes
        elif target in SPLITS and split is not None and split_dim(node) == split.dim:
            begins = sizes_of(node)
            lengths = [split.among(a, b - a).count for a, b in pairwise(begins)]
            target, args, kwargs = aten.split_with_sizes.default, [args[0], lengths, split.dim], {}
        elif target is aten.slice.Tensor and isinstance(source, fx.Node):
            args = self._sliced(node, args, self.split[source])
        self.env[node] = self.call(target, tuple(args), node, kwargs, node.name)  # type: ignore[arg-type]

    def _sliced(self, node: fx.Node, args: list, split: Split | None) -> list:
        if split is None or split.dim != sliced_dim(node):
            return args
        first, length = slice_of(node)
        before = split.among(0, first).count
        return [args[0], split.dim, before, before + split.among(first, length).count]

    def _operand(self, node: fx.Node, operand: fx.Node) -> fx.Node:
        """An operand as a rank's operator takes it: of a value that all ranks have whole the part that the others of a
        pointwise operator have."""
        split, mine = self.split[node], self.split[operand]
        if mine is not None or split is None or not is_pointwise(node):
            return self.env[operand]
        dim = dict(aligned_operands(node, split.dim)).get(operand)
        return self.env[operand] if dim is None else self._narrow(self.env[operand], dim, split.held, node)

    def _narrow(self, value: fx.Node, dim: int, held: Ranges, like: fx.Node) -> fx.Node:
        pieces = [self.call(aten.slice.Tensor, (value, dim, first, end), like) for first, end in held]
        return pieces[0] if len(pieces) == 1 else self.call(aten.cat.default, (pieces, dim), like)

    def _product(self, node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None, transposed: bool) -> fx.Node:
        """A product over a rank's part of a weight: some rows of it, or some columns, whose sums all ranks then add. A
        bias is added by each rank in equal parts, which for two, four, … ranks are exact."""
        into, rows = self.split[x], self.wanted.get(node)
        env = dict(self.env)
        if f"{weight.name}_rows" in self.cuts.rows:
            env[weight] = self.head_rows
        if into is not None and bias is not None:
            env[bias] = self.call(aten.mul.Tensor, (self.env[bias], 1 / self.share.size(into.axes)), node)
        made = self.call(node.target, map_aggregate(node.args, lambda n: env.get(n, n)), node, name=node.name)  # type: ignore[arg-type, call-overload]
        if into is not None:
            return self.exchange.summed(made, into.axes, node)
        return self.exchange.gathered(made, rows, node) if rows is not None and node is self.head else made

    def _whole(self, node: fx.Node) -> fx.Node:
        split = self.split[node]
        if split is None:
            return self.env[node]
        raise ShardError(f"{node.name} leaves a layer in parts {split.held} of {split.size}")


def shard(gm: fx.GraphModule, share: RankShare, units: Mapping[str, int]) -> None:
    """Make a captured step graph, and the blocks that it calls, those of one rank: weights, heads and caches are parts,
    and a collective adds up what each rank has of a layer's sums; hidden states are whole on every rank. `units`: of
    weights stored in groups, by name, how many input features belong together. What was cut stands in
    `gm.meta["cuts"]`, by block ("": the step). ShardError names what cannot be divided so, and what would do.
    """
    found: dict[Any, Cuts] = {}
    blocks: dict[Any, fx.GraphModule] = dict(block_graphs(gm))
    for name, block in blocks.items():
        demand = Demand(share)
        demand.of_layer(block, {n: units[weight_name(n)] for n in block.graph.find_nodes(op="placeholder")  # type: ignore[index]
                                if weight_name(n) in units})
        found[name] = Divided(block, share, demand.wanted, None).run()
    head = _head(gm)
    wanted = {} if head is None else {head: _head_rows(head, share)}
    divided = Divided(gm, share, wanted, head)
    for call in gm.graph.find_nodes(op="call_module"):
        heads, cuts, block = found[call.target].heads, found[call.target].weights, blocks[call.target]
        for given, inner in zip(call.args, block.graph.find_nodes(op="placeholder"), strict=True):
            mark = given.meta.get(META)
            if isinstance(mark, CacheInput) and inner.name in heads:
                divided.cuts.heads[given.name] = heads[inner.name]
            elif isinstance(mark, WeightInput) and weight_name(inner) in cuts:
                divided.cuts.weights[mark.name] = cuts[weight_name(inner)]  # type: ignore[index]
    found[""] = divided.run()
    gm.meta["cuts"] = found


def _head(gm: fx.GraphModule) -> fx.Node | None:
    """The product that gives logits: the last one of the step, behind all layers."""
    after = False
    found = None
    for node in gm.graph.nodes:
        after |= node.op == "call_module"
        if after and product_of(node) is not None and not product_of(node)[3]:  # type: ignore[index]
            found = node
    return found


def _head_rows(head: fx.Node, share: RankShare) -> Split:
    """Rows of the head, as many on each rank but perhaps the last ones."""
    size, parts = shape_of(head)[-1], share.beside
    each = -(-size // parts)
    if 2 * (size - (parts - 1) * each) < each:
        raise ShardError(f"{head.name}: a vocabulary of {size} is too small for {parts} ranks")
    at = share.index(share.axes) * each
    return Split(len(shape_of(head)) - 1, ranges([(at, min(at + each, size))]), size, share.axes)
