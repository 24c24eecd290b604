"""The graph of one rank, from how it and the ranks beside it have each value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from forebay.passes.shard.collectives import Collectives, stretches_of
from forebay.passes.shard.cuts import Cuts
from forebay.passes.shard.demand import (
    aligned_operands,
    caches_of,
    is_pointwise,
    over_cache,
    product_of,
    slice_of,
    sliced_dim,
)
from forebay.passes.shard.placed import RankSplits
from forebay.passes.shard.sequences import AllSequences, Apart, OwnSequences
from forebay.passes.shard.split import SPLITS, VIEWS, ShardError, Split, shape_of, sizes_of, split_dim
from forebay.passes.shard.statistics import MEANS, NORMS, epsilon_of, normed, weighted, whole_mean
from forebay.rewriter.ir.graph import META, WeightInput, copy_node, weight_name
from forebay.rewriter.ir.share import Ranges, RankShare, WeightCut, count, ranges
from forebay.rewriter.ir.symbolic_values import symbolic_value

aten = torch.ops.aten
ROWS = ".rows"  # ends the name of a weight that is rows of another, which is read whole as well


class Divided:
    """One graph on its way to a rank's: `peers` say how the ranks along the wide axis have each value, `split` how this
    one does, `run` makes the new graph. Products that are as far from a layer's input exchange together. Where weights
    are `stored` in other parts than products read, these are gathered."""

    def __init__(self, gm: fx.GraphModule, share: RankShare, wanted: Mapping[int, Mapping[fx.Node, Split]],
                 head: fx.Node | None, in_layer: bool, apart: Apart, stored: Cuts | None = None) -> None:
        self.gm, self.share, self.head, self.in_layer, self.apart = gm, share, head, in_layer, apart
        self.wanted = wanted
        self.peers = [RankSplits(gm, each, wanted[each.rank], head, in_layer, apart.nodes) for each in share.peers]
        self.own = self.peers[share.index(share.wide)]
        self.split = self.own.split
        self.products = {node: found for node in gm.graph.nodes if (found := product_of(node)) is not None}
        self.levels = levels(gm, self.products)
        self.added = self._added() if in_layer else {}
        self.appends = [node for node in gm.graph.nodes if over_cache(node)]
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.normed: dict[Any, fx.Node] = {}  # norms of one value, which differ in what follows, exchange once
        self.cuts = Cuts()
        self.stored = stored
        self.read: dict[str, WeightCut] = {}  # cuts of what products read, where more of it is gathered
        self.whole: dict[fx.Node, fx.Node] = {}
        self.exchange = Collectives(self.call, share)
        self.all_sequences = AllSequences(gm, share.sharers)
        self.sequences = OwnSequences(apart, self.all_sequences, share, self.exchange, self.graph, self.env)

    def run(self) -> Cuts:
        self._cut_inputs()
        for node in self.gm.graph.nodes:
            self._emit(node)
        self.gm.graph = self.graph
        return self.cuts

    def _emit(self, node: fx.Node) -> None:
        """Make a node's, and before it what it reads, and what must have touched caches before it does."""
        if node in self.env:
            return
        before = self.appends[: self.appends.index(node)] if node in self.appends else []
        for other in (*node.all_input_nodes, *before):
            self._emit(other)
        if node in self.env:
            return
        if node.op == "placeholder":
            self._input(node)
        elif node.op in ("output", "call_module"):
            handed = {each: self._handed(node, each) for each in node.all_input_nodes}
            self.env[node] = self._copied(node, handed)
            if node.op == "call_module":
                self.env[node].meta["val"] = self._part(self.env[node].meta["val"], _cut_of(self.split[node]))
        else:
            self._operator(node)

    # -- weights and caches

    def _cut_inputs(self) -> None:
        """What of weights and caches a rank has, before any node is made: placeholders come first."""
        for node, (x, weight, bias, transposed) in self.products.items():
            rows, columns = self._sides(node, x)
            out, into = (1, 0) if transposed else (0, 1)
            cut = tuple(sorted((dim, split) for dim, split in ((out, rows), (into, columns)) if split is not None))
            inward = self.split[x] is None or self.own.is_hidden(self.split[x])
            sides = (self.share.deep, self.share.wide) if inward else (self.share.wide, self.share.deep)
            if cut:
                self._cut(weight, cut, {out: sides[0], into: sides[1]})
            if rows is not None and bias is not None and weight_name(bias) is not None:
                self._cut(bias, ((0, rows),), {0: sides[0]})
        for node in self.gm.graph.nodes:
            for cache in caches_of(node):
                for operand in over_cache(node) if node.meta["val"] is None else ():
                    placed = self.split[operand]
                    self.cuts.heads[cache.name] = shape_of(cache)[1] if placed is None else placed.count
        if self.stored is not None:
            self.read, self.cuts.weights = self.cuts.weights, dict(self.stored.weights)

    def _weight(self, node: fx.Node, like: fx.Node) -> fx.Node:
        """A weight as products read it: gathered, where ranks have less of it."""
        name = weight_name(node)
        if self.stored is None or name is None or node in self.whole:
            return self.whole.get(node, self.env[node])
        read, sizes = dict(self.read.get(name, ())), shape_of(node)
        along: dict[int, tuple[tuple[int, ...], int]] = {}
        for dim, part in self.stored.weights.get(name, ()):
            axes = tuple(i for i in self.stored.along[name][dim] if i in self.share.beyond)
            wanted = read.get(dim, ((0, sizes[dim]),))
            stretches = stretches_of(wanted, part, self.share.size(axes), self.share.index(axes))
            if not stretches:
                raise ShardError(f"{name}: {sizes[dim]} cannot be divided evenly among the ranks that gather it; take "
                                 "layout=2d")
            along |= {dim: (axes, stretches)} if axes else {}
        self.whole[node] = self.exchange.whole(self.env[node], along, like) if along else self.env[node]
        return self.whole[node]

    def _sides(self, node: fx.Node, x: fx.Node) -> tuple[Ranges | None, Ranges | None]:
        """The rows and the columns of a product's weight that a rank has; None for all."""
        into, rows = self.split[x], self.own.wanted.get(node)
        if into is None:
            return None if rows is None else rows.held, None
        if self.own.is_hidden(into):
            if not self.in_layer:
                return None if rows is None else rows.held, None
            return None if rows is None else self._of_peers([peer.wanted[node] for peer in self.peers]), into.held
        made = self.own.hidden(node)
        return None if made is None else made.held, self._of_peers([peer.split[x] for peer in self.peers])

    @staticmethod
    def _of_peers(splits: Sequence[Split | None]) -> Ranges:
        """What ranks along the wide axis have together."""
        return ranges(piece for split in splits if split is not None for piece in split.held)

    def _cut(self, weight: fx.Node, cut: WeightCut, along: dict[int, tuple[int, ...]]) -> None:
        name = weight_name(weight)
        assert name is not None
        others = [user for user in weight.users if product_of(user) is None and user.op != "call_module"]
        if others:  # a table of tokens that is the head too: the head reads rows of its own
            self.cuts.rows[f"{weight.name}_rows"] = weight.name
            name += ROWS
        self.cuts.along[name] = along
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
        else:
            new.meta["val"] = self._part(self.all_sequences.of(value), _cut_of(self.split[node]))

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
        return value.new_empty(shape) if cut else value

    # -- the new graph

    def call(self, target: Callable, args: tuple, like: fx.Node, kwargs: dict[str, Any] | None = None,
             name: str | None = None) -> fx.Node:
        """A node with the value that it gives, in the place of `like`."""
        given, named = map_aggregate((args, kwargs or {}),  # type: ignore[arg-type, misc]
                                     lambda v: v.meta["val"] if isinstance(v, fx.Node) else v)
        new = self.graph.create_node("call_function", target, args, kwargs or {}, name=name)
        new.meta.update({key: value for key, value in like.meta.items() if key != META},
                        val=symbolic_value(target, given, named))
        return new

    def _copied(self, node: fx.Node, env: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """A node that is computed for all sequences."""
        new = copy_node(self.graph, node, env)
        if "val" in node.meta:
            new.meta["val"] = self.all_sequences.of(node.meta["val"])
        return new

    def _operator(self, node: fx.Node) -> None:
        split, product = self.split[node], self.products.get(node)
        if node in self.apart.nodes:
            self._apart(node)
            return
        if product is not None:
            self._product(node, *product)
            return
        source = node.args[0] if node.args else None
        parted = self.split[source] if isinstance(source, fx.Node) else None
        if parted is not None and self.own.is_hidden(parted) and node.target in (*NORMS, *MEANS):
            self._over_hidden(node, self.env[source], parted)  # type: ignore[index]
            return
        if node in self.added.values():
            made = self.call(node.target, tuple(self.env[n] for n in node.args), node, name=node.name)  # type: ignore[arg-type, index, misc]
            self.env[node] = self.exchange.summed(made, self.share.deep, node)
            return
        if split is None and all(self.split[operand] is None for operand in node.all_input_nodes):
            self.env[node] = self._copied(node, self.env)
            return
        operands = {operand: self._operand(node, operand) for operand in node.all_input_nodes}
        given: Any = map_aggregate((node.args, node.kwargs), lambda n: operands[n] if isinstance(n, fx.Node) else n)  # type: ignore[arg-type]
        args: list[Any] = list(given[0])
        kwargs: dict[str, Any] = dict(given[1])
        target = node.target
        if split is not None and target is aten.empty.memory_format:  # fresh memory, of no value that could be run
            new = self.env[node] = self._copied(node, self.env)
            new.args = ([*args[0][:-1], split.count],)
            new.meta["val"] = self._part(new.meta["val"], _cut_of(split))
            return
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
        elif target is aten.gather.default and split is not None:
            args[2] = self._narrow(args[2], split.dim, split.held, node)
        self.env[node] = self.call(target, tuple(args), node, kwargs, node.name)  # type: ignore[arg-type]

    def _apart(self, node: fx.Node) -> None:
        """What a rank computes for its own sequences, once it has all features of what products made."""
        for product in node.all_input_nodes:
            if product in self.apart.entering and product not in self.sequences.own:
                beside = [n for n in self.apart.entering if self.levels[n] == self.levels[product]]
                for other in beside:
                    self._emit(other)
                self.sequences.entered(beside, [[wants[n].held for n in beside] for wants in self.wanted.values()])
        self.env[node] = self.sequences.computed(node)

    def _sliced(self, node: fx.Node, args: list, split: Split | None) -> list:
        if split is None or split.dim != sliced_dim(node):
            return args
        first, length = slice_of(node)
        before = split.among(0, first).count
        return [args[0], split.dim, before, before + split.among(first, length).count]

    def _over_hidden(self, node: fx.Node, x: fx.Node, split: Split) -> None:
        if node.target in MEANS:
            self.env[node] = whole_mean(node, x, split, self.exchange)
            return
        vectors = [None if not isinstance(n, fx.Node) else self._narrow(self.env[n], 0, split.held, node)
                   for n in node.args[2 : 4 if node.target is aten.layer_norm.default else 3]]
        kept = x, node.target, epsilon_of(node)
        if kept not in self.normed:
            self.normed[kept] = normed(node, x, split, self.exchange)
        self.env[node] = weighted(node, self.normed[kept], vectors, x.meta["val"].dtype, self.exchange)

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

    def _handed(self, node: fx.Node, value: fx.Node) -> fx.Node:
        """A value as a layer takes it or gives it: a part of a hidden state, all of others."""
        if self.own.is_hidden(split := self.split[value]):
            return self.env[value]
        if split is not None:
            raise ShardError(f"{value.name} leaves a layer in parts {split.held} of {split.size}")
        enters = node.op == "call_module" and node.args[0] is value
        part = self.own.hidden(value) if enters or (self.in_layer and node.op == "output") else None
        if part is None:
            return self.env[value]
        whole = self.call(aten.clone.default, (self.env[value],), value)  # all that a lookup loads must be read
        return self.exchange.dense(self._narrow(whole, part.dim, part.held, value), value)

    # -- products

    def _product(self, node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None, transposed: bool) -> None:
        """A product over a rank's part of a weight: some rows of it, or some columns, whose sums ranks then add up, or
        both."""
        into, rows = self.split[x], self.own.wanted.get(node)
        if into is None:
            self.env[node] = self._headed(node, self._made(node, self.env[x], ()))
        elif self.own.is_hidden(into):
            if not self.in_layer:
                whole = self.exchange.gathered(self.env[x], into, node)
                self.env[node] = self._headed(node, self._made(node, whole, ()))
            elif rows is None:
                made = self._made(node, self.env[x], into.axes)
                self.env[node] = self.exchange.summed(made, into.axes, node)
            else:
                self._scattered(self._beside(node, lambda n: n in self.own.wanted and self._reads_hidden(n)))
        else:
            self._joined([node] if not self.share.wide else self._beside(node, lambda n: not self._reads_hidden(n)))

    def _headed(self, node: fx.Node, made: fx.Node) -> fx.Node:
        rows = self.own.wanted.get(node)
        return self.exchange.gathered(made, rows, node) if rows is not None and node is self.head else made

    def _reads_hidden(self, node: fx.Node) -> bool:
        return self.own.is_hidden(self.split[self.products[node][0]])

    def _beside(self, node: fx.Node, takes: Callable[[fx.Node], bool]) -> list[fx.Node]:
        """The products that exchange together with this one, once there is what they read."""
        found = [n for n in self.products if self.levels[n] == self.levels[node] and
                 self.split[self.products[n][0]] is not None and takes(n)]
        for other in found:
            self._emit(self.products[other][0])
        return found

    def _scattered(self, products: Sequence[fx.Node]) -> None:
        """Products of parts of a hidden state, whose sums all peers add up, each those of its own features."""
        wide = self.share.wide
        made = [self._made(n, self.env[self.products[n][0]], wide) for n in products]
        parts = [[peer.wanted[n].held for n in products] for peer in self.peers]
        self.env.update(zip(products, self.exchange.scattered(made, parts, wide, products[0]), strict=True))

    def _joined(self, products: Sequence[fx.Node]) -> None:
        """Products that sum over features, those of all peers."""
        inputs = [self.products[n][0] for n in products]
        given = [self.sequences.left(x, [wants[x].held for wants in self.wanted.values()])
                 if x in self.apart.nodes else self.env[x] for x in inputs]
        if self.share.wide:
            parts = [[peer.split[x].held for x in inputs] for peer in self.peers]  # type: ignore[union-attr]
            given = self.exchange.joined(given, parts, self.share.wide, products[0])
        for node, x in zip(products, given, strict=True):
            made = self._made(node, x, self.share.deep)
            self.env[node] = made if node in self.added else self.exchange.summed(made, self.share.deep, node)

    def _made(self, node: fx.Node, x: fx.Node, summed: tuple[int, ...]) -> fx.Node:
        """A product on this rank. Of what is summed over several ranks each adds the bias in equal parts, which for
        two, four, … ranks are exact."""
        given, weight, bias, _ = self.products[node]
        env = {**self.env, given: x, weight: self._weight(weight, node)}
        if f"{weight.name}_rows" in self.cuts.rows:
            env[weight] = self.head_rows
        if bias is not None:
            env[bias] = self._weight(bias, node)
        if bias is not None and self.share.size(summed) > 1:
            env[bias] = self.call(aten.mul.Tensor, (env[bias], 1 / self.share.size(summed)), node)
        return self.call(node.target, map_aggregate(node.args, lambda n: env.get(n, n)), node, name=node.name)  # type: ignore[arg-type, call-overload]

    def _added(self) -> dict[fx.Node, fx.Node]:
        """Products that sum over features and are read by one addition of two of them alone, with it: of attention and
        feed-forward side by side. Ranks add those up at once."""
        found: dict[fx.Node, fx.Node] = {}
        for node in self.gm.graph.nodes:
            both = node.all_input_nodes
            if node.target is aten.add.Tensor and len(both) == len(node.args) == 2 and not node.kwargs and all(
                    n in self.products and len(n.users) == 1 and (into := self.split[self.products[n][0]]) is not None
                    and not self.own.is_hidden(into) for n in both):
                found |= dict.fromkeys(both, node)
        return found


def levels(gm: fx.GraphModule, products: Mapping[fx.Node, Any]) -> dict[fx.Node, int]:
    """How many products a value has been through."""
    found: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        found[node] = max((found[n] for n in node.all_input_nodes), default=0) + (node in products)
    return found


def _cut_of(split: Split | None) -> WeightCut:
    return () if split is None else ((split.dim, split.held),)
