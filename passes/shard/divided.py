"""The graph of one rank, from how it and the ranks beside it have each value."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from forebay.kernels.operators import EXPERTS
from forebay.passes.shard.collectives import positions
from forebay.passes.shard.cuts import Cuts
from forebay.passes.shard.demand import (
    JOINING,
    STATES,
    aligned_operands,
    dim_of_joined,
    is_pointwise,
    joined_dim,
    slice_of,
    sliced_dim,
    table_of,
)
from forebay.passes.shard.looped import ONCE
from forebay.passes.shard.rank_inputs import RankInputs, cut_of
from forebay.passes.shard.split import SPLITS, VIEWS, ShardError, Split, shape_of, sizes_of, split_dim
from forebay.passes.shard.statistics import MEANS, NORMS, epsilon_of, normed, weighted, whole_mean
from forebay.rewriter.ir.graph import copy_node
from forebay.rewriter.ir.share import Ranges, ranges

aten = torch.ops.aten
ROWS = ".rows"  # ends the name of a weight that is rows of another, which is read whole as well


class Divided(RankInputs):
    """One graph on its way to a rank's; `run` makes the new graph."""

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
            new = self.env[node] = self._copied(node, handed)
            if node.op == "call_module":
                new.args = tuple(each for old, given in zip(node.args, new.args, strict=True)
                                 for each in self.pieces.get(old, [given]))  # type: ignore[arg-type, call-overload, list-item]
                self.env[node].meta["val"] = self._part(self.env[node].meta["val"], cut_of(self.split[node]))
        else:
            self._operator(node)

    # -- the new graph

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
        if (table := table_of(node)) in self.tables:
            self._experts(node, self.tables[table])  # type: ignore[index]
            return
        source = node.args[0] if node.args else None
        parted = self.split[source] if isinstance(source, fx.Node) else None
        if parted is not None and self.own.is_hidden(parted) and node.target in (*NORMS, *MEANS):
            self._over_hidden(node, self.env[source], parted)  # type: ignore[index]
            return
        if node in self.added.values():
            self.env[node] = self._summed(node, node.args)  # type: ignore[arg-type]
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
            new.meta["val"] = self._part(new.meta["val"], cut_of(split))
            return
        if split is not None and target in STATES:
            for i in STATES[target].by_row:  # type: ignore[index]
                if isinstance(args[i], fx.Node) and self.split[node.args[i]] is None:  # type: ignore[index]
                    args[i] = self._narrow(args[i], 0, split.held, node)
        elif split is not None and (target in VIEWS or target is aten.expand.default):
            sizes = list(args[1])
            if not isinstance(node.meta["val"].shape[split.dim], int):  # heads among sequences and tokens
                sizes[split.dim] = -1
            elif isinstance(sizes[split.dim], int) and sizes[split.dim] > 0:
                sizes[split.dim] = split.count
            args[1] = sizes
        elif target in SPLITS and split is not None and split_dim(node) == split.dim:
            begins = sizes_of(node)
            lengths = [split.among(a, b - a).count for a, b in itertools.pairwise(begins)]
            target, args, kwargs = aten.split_with_sizes.default, [args[0], lengths, split.dim], {}
        elif target is aten.slice.Tensor and isinstance(source, fx.Node):
            args = self._sliced(node, args, self.split[source])
        elif target is aten.gather.default and split is not None:
            args[2] = self._narrow(args[2], split.dim, split.held, node)
        self.env[node] = self.call(target, tuple(args), node, kwargs, node.name)  # type: ignore[arg-type]

    def _apart(self, node: fx.Node) -> None:
        """Compute attention for a rank's own sequences, once it has all features of the projections."""
        for product in node.all_input_nodes:
            if product in self.apart.entering and product not in self.sequences.own:
                beside = [n for n in self.apart.entering if self.levels[n] == self.levels[product]]
                for other in beside:
                    self._emit(other)
                self.sequences.entered(beside, [[wants[n].held for n in beside] for wants in self.wanted.values()])
        self.env[node] = self.sequences.computed(node)

    def _experts(self, node: fx.Node, held: Ranges) -> None:
        """Add up the results of all ranks' experts. Picks of others' experts have no entry in its table."""
        index: Any = EXPERTS.argument(node.args, "index")
        own = self.call(aten.sub.Tensor, (self.env[index], held[0][0]), node) if held[0][0] else self.env[index]
        args = map_aggregate(node.args, lambda n: own if n is index else self.env.get(n, n))  # type: ignore[arg-type, call-overload]
        made = self.call(EXPERTS.overload, args, node, name=node.name)  # type: ignore[arg-type]
        self.env[node] = self.exchange.summed(made, self.share.deep, node)

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
        pointwise operator have, or that it is put beside."""
        split, mine = self.split[node], self.split[operand]
        if mine is not None or split is None or not (is_pointwise(node) or node.target in JOINING):
            return self.env[operand]
        if node.target is aten.cat.default and split.dim == joined_dim(node):
            return self.env[operand]
        dim = dim_of_joined(node, split.dim) if node.target in JOINING else (
            dict(aligned_operands(node, split.dim)).get(operand))
        if dim is not None and not isinstance(shape_of(operand)[dim], int):
            raise ShardError(f"{node.name}: {operand.name} is whole where ranks have parts of sequences and tokens")
        return self.env[operand] if dim is None else self._narrow(self.env[operand], dim, split.held, node)

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

    def _beside(self, node: fx.Node, takes: Callable[[fx.Node], bool]) -> list[fx.Node]:
        """The products that exchange together with this one, once there is what they read."""
        found = [n for n in self.products if self.levels[n] == self.levels[node] and
                 self.split[self.products[n][0]] is not None and takes(n)]
        for other in found:
            self._emit(self.products[other][0])
        return found

    def _scattered(self, products: Sequence[fx.Node]) -> None:
        """Products of parts of a hidden state, whose sums all peers add up, each those of its own features."""
        wide, like = self.share.wide, products[0]
        own: dict[fx.Node, list[fx.Node]] = {node: [] for node in products}
        for turn in self.loop.turns:
            pieces = list(itertools.product(products, turn))
            made = [self._made(n, self.env[self.products[n][0]], wide, piece) for n, piece in pieces]
            parts = list(zip(*(self._portions(n, piece) for n, piece in pieces), strict=True))
            for (n, _), value in zip(pieces, self.exchange.scattered(made, parts, wide, like), strict=True):
                own[n].append(value)
        for node, values in own.items():
            self.env[node] = self.exchange.beside(values, node)

    def _joined(self, products: Sequence[fx.Node]) -> None:
        """Products that sum over features, those of all peers."""
        inputs = [self.products[n][0] for n in products]
        given = [self.sequences.left(x, [wants[x].held for wants in self.wanted.values()])
                 if x in self.apart.nodes else self.env[x] for x in inputs]
        if self.share.wide:
            for turn in self.gathers.turns:
                self._gathered(products, given, turn)
        else:
            self.entered |= {(node, 0): x for node, x in zip(products, given, strict=True)}
        for node in products:
            self.env[node] = self._entered(node, 0) if node in self.added else self._summed(node, [node])

    def _gathered(self, products: Sequence[fx.Node], given: Sequence[fx.Node], turn: range) -> None:
        """Exchange what these pieces of products read, of which this rank has parts `given`."""
        pieces = list(itertools.product(products, turn))
        values = [x for x in given for _ in turn]
        held = [self.split[self.products[n][0]].held for n, _ in pieces]  # type: ignore[union-attr]
        parts = list(zip(*(self._columns(*piece) for piece in pieces), strict=True))
        every = self.exchange.joined(values, held, parts, self.share.wide, products[0])
        self.arriving |= dict.fromkeys(pieces, (every, pieces, parts))

    def _entered(self, node: fx.Node, piece: int) -> fx.Node:
        """Return the input of a piece of a matmul. It is joined here, so that later exchanges are already under way."""
        if (node, piece) not in self.entered:
            every, pieces, parts = self.arriving[node, piece]
            made = self.exchange.beside_each_other(every, parts, node)
            self.entered |= dict(zip(pieces, made, strict=True))
        return self.entered[node, piece]

    def _summed(self, node: fx.Node, products: Sequence[fx.Node]) -> fx.Node:
        """A product, or two added, whose sums all ranks along the deep axes are to have."""
        if self._gathers(products[0]):
            every = (self._piece(node, products, i) for i in range(self.gathers.pieces))
            added = functools.reduce(lambda a, b: self.call(aten.add.Tensor, (a, b), node), every)
            return self.exchange.summed(added, self.share.deep, node)
        done = []
        for turn in self.loop.turns if self._in_pieces(products[0]) else ONCE.turns:
            parts = [self._piece(node, products, i) for i in turn]
            done.append(self.exchange.summed(self.exchange.beside(parts, node), self.share.deep, node))
        return self.exchange.beside(done, node)

    def _piece(self, node: fx.Node, products: Sequence[fx.Node], piece: int) -> fx.Node:
        """A piece of a product, or of two added."""
        made = tuple(self._made(n, self._entered(n, piece if self._gathers(n) else 0), self.share.deep, piece)
                     for n in products)
        return made[0] if len(made) == 1 else self.call(node.target, made, node, name=node.name)  # type: ignore[arg-type]

    def _made(self, node: fx.Node, x: fx.Node, summed: tuple[int, ...], piece: int = 0) -> fx.Node:
        """A product on this rank, or a piece of it. Of what is summed over several ranks, or pieces, each adds the bias
        in equal parts, which for two, four, … are exact."""
        given, weight, bias, _ = self.products[node]
        env = {**self.env, given: x, weight: self._weight(weight, node)}
        if weight in self.pieces:
            env[weight] = self.pieces[weight][piece]
        if f"{weight.name}_rows" in self.cuts.rows:
            env[weight] = self.head_rows
        if bias is not None:
            env[bias] = self._weight(bias, node)
        if bias is not None and self._in_pieces(node):
            env[bias] = self._of_piece(env[bias], node, piece)
        terms = self.share.size(summed) * (self.gathers.pieces if self._gathers(node) else 1)
        if bias is not None and terms > 1:
            env[bias] = self.call(aten.mul.Tensor, (env[bias], 1 / terms), node)
        return self.call(node.target, map_aggregate(node.args, lambda n: env.get(n, n)), node, name=node.name)  # type: ignore[arg-type, call-overload]

    def _of_piece(self, bias: fx.Node, node: fx.Node, piece: int) -> fx.Node:
        """Return the part of the bias for a piece of a matmul."""
        every = range(self.loop.pieces)
        whole, part = (ranges(part for i in pieces for theirs in self._portions(node, i) for part in theirs)
                       for pieces in (every, (piece,)))
        return self._narrow(bias, 0, positions(whole, part), node)
