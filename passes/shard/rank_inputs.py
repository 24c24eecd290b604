"""The weights and caches of one rank's graph, from how it and the ranks beside it have each value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from forebay.passes.shard.collectives import ByRank, Collectives, stretches_of
from forebay.passes.shard.cuts import Cuts
from forebay.passes.shard.demand import STATES, caches_of, over_cache, product_of, table_of
from forebay.passes.shard.looped import ONCE, InChunks, added_up, levels, piece_name, portion
from forebay.passes.shard.placed import RankSplits
from forebay.passes.shard.sequences import AllSequences, OwnSequences, SequenceParallelRegion
from forebay.passes.shard.split import ShardError, Split, shape_of
from forebay.rewriter.ir.graph import META, WeightInput, copy_node, weight_name
from forebay.rewriter.ir.share import Ranges, RankShare, WeightCut, count, even_part, ranges
from forebay.rewriter.ir.symbolic_values import symbolic_value

aten = torch.ops.aten
ProductPiece = tuple[fx.Node, int]  # of a product
ROWS = ".rows"  # ends the name of a weight that is rows of another, which is read whole as well


class RankInputs:
    """A rank's parts of one graph's weights and caches, and the parts that matmuls read: `peers` say how the ranks
    along the wide axis have each value, `split` how this one does. Products that are as far from a layer's input
    exchange together, those whose sums are added up as `loop` says; what ranks along the wide axis have of a product's
    input is gathered as `gathers` says, in whole `units` of a weight's input features. Where weights are `stored` in
    other parts than products read, these are gathered."""

    def __init__(self, gm: fx.GraphModule, share: RankShare, wanted: Mapping[int, Mapping[fx.Node, Split]],
                 head: fx.Node | None, in_layer: bool, apart: SequenceParallelRegion, stored: Cuts | None = None,
                 loop: InChunks = ONCE, gathers: InChunks = ONCE, units: Mapping[fx.Node, int] | None = None) -> None:
        self.gm, self.share, self.head, self.in_layer, self.apart = gm, share, head, in_layer, apart
        self.wanted = wanted
        self.peers = [RankSplits(gm, each, wanted[each.rank], head, in_layer, apart.nodes) for each in share.peers]
        self.own = self.peers[share.index(share.wide)]
        self.split = self.own.split
        self.products = {node: found for node in gm.graph.nodes if (found := product_of(node)) is not None}
        self.levels = levels(gm, self.products)
        self.added = added_up(gm, self._sums) if in_layer else {}
        self.appends = [node for node in gm.graph.nodes if over_cache(node)]
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.normed: dict[Any, fx.Node] = {}  # norms of one value, which differ in what follows, exchange once
        self.cuts, self.loop, self.gathers, self.units = Cuts(), loop, gathers, units or {}
        self.pieces: dict[fx.Node, list[fx.Node]] = {}
        self.tables: dict[fx.Node, Ranges] = {}  # of experts, and those that a rank has
        # exchanges, and whose inputs they bring; and these, of products that sum over features
        self.arriving: dict[ProductPiece, tuple[fx.Node, list[ProductPiece], ByRank]] = {}
        self.entered: dict[ProductPiece, fx.Node] = {}
        self.stored = stored
        self.read: dict[str, WeightCut] = {}  # cuts of what products read, where more of it is gathered
        self.whole: dict[fx.Node, fx.Node] = {}
        self.exchange = Collectives(self.call, share)
        self.all_sequences = AllSequences(gm, share.sharers)
        self.sequences = OwnSequences(apart, self.all_sequences, share, self.exchange, self.graph, self.env)

    def _cut_inputs(self) -> None:
        """Cut weights and caches for a rank, before any node is made: placeholders come first."""
        for node, (x, weight, bias, transposed) in self.products.items():
            rows, columns = self._sides(node, x)
            out, into = (1, 0) if transposed else (0, 1)
            cut = tuple(sorted((dim, split) for dim, split in ((out, rows), (into, columns)) if split is not None))
            inward = self.split[x] is None or self.own.is_hidden(self.split[x])
            sides = (self.share.deep, self.share.wide) if inward else (self.share.wide, self.share.deep)
            if self._gathers(node):
                self._cut_pieces(weight, into, cut, [self._columns(node, i) for i in range(self.gathers.pieces)])
            elif self._in_pieces(node):
                self._cut_pieces(weight, out, cut, [self._portions(node, i) for i in range(self.loop.pieces)])
            elif cut:
                self._cut(weight, cut, {out: sides[0], into: sides[1]})
            if rows is not None and bias is not None and weight_name(bias) is not None:
                self._cut(bias, ((0, rows),), {0: sides[0]})
        for node in self.gm.graph.nodes:
            name = weight_name(node)
            if name is not None and (part := self.split[node]) is not None:
                self.cuts.weights[name], self.cuts.along[name] = cut_of(part), {part.dim: part.axes}
            elif (table := table_of(node)) is not None and self.share.size(self.share.deep) > 1:
                name = weight_name(table)
                assert name is not None
                self.tables[table] = self._experts_held(table)
                self.cuts.weights[name], self.cuts.along[name] = ((0, self.tables[table]),), {0: self.share.deep}
            for cache in caches_of(node):
                for operand in over_cache(node) if node.meta["val"] is None else ():
                    placed = self.split[operand]
                    self.cuts.heads[cache.name] = 1, shape_of(cache)[1] if placed is None else placed.count
            if node.target in STATES and (placed := self.split[node]) is not None:
                state = STATES[node.target]  # type: ignore[index]
                self.cuts.heads[node.args[state.argument].name] = state.dim, placed.count  # type: ignore[union-attr]
        if self.stored is not None:
            self.read, self.cuts.weights = self.cuts.weights, dict(self.stored.weights)

    def _experts_held(self, table: fx.Node) -> Ranges:
        """The experts of a table that a rank has: neighbours, as many on each."""
        ranks, experts = self.share.size(self.share.deep), shape_of(table)[0]
        if experts < ranks:
            raise ShardError(f"{weight_name(table)}: {experts} experts are too few for {ranks} ranks; take fewer ranks")
        return even_part(experts, ranks, self.share.index(self.share.deep))

    def _sums(self, node: fx.Node) -> bool:
        """Return whether a product sums over features of which ranks have parts, and all of them are to have the
        sums."""
        into = self.split[self.products[node][0]] if node in self.products else None
        return into is not None and not self.own.is_hidden(into)

    def _in_pieces(self, node: fx.Node) -> bool:
        """Return whether a product's results are made in pieces: ranks add them up."""
        scattered = self.in_layer and self._reads_hidden(node) and node in self.own.wanted
        added = self.in_layer and self._sums(node) and self.share.size(self.share.deep) > 1
        return self.loop.pieces > 1 and (scattered or added) and not self._gathers(node)

    def _gathers(self, node: fx.Node) -> bool:
        """Return whether what a product reads is gathered in pieces, and its sums at once: it falls in one way."""
        return self.gathers.pieces > 1 and self.in_layer and self._sums(node) and bool(self.share.wide)

    def _cut_pieces(self, weight: fx.Node, dim: int, cut: WeightCut, pieces: Sequence[Sequence[Ranges]]) -> None:
        """Cut dimension `dim` of a product's weight into pieces too, of each of which peers have these parts."""
        name, others = weight_name(weight), tuple(each for each in cut if each[0] != dim)
        assert name is not None
        if len(weight.users) > 1:
            raise ShardError(f"{name} is read by several, so its matmul cannot fall into pieces; leave chunks out")
        self.cuts.in_pieces[name] = len(pieces)
        for i, parts in enumerate(pieces):
            held = ranges(part for theirs in parts for part in theirs)
            self.cuts.weights[piece_name(name, i)] = tuple(sorted((*others, (dim, held))))

    def _columns(self, node: fx.Node, piece: int) -> list[Ranges]:
        """The input features in a piece of a product, those that each peer has."""
        x, weight, *_ = self.products[node]
        theirs = [peer.split[x].held for peer in self.peers]  # type: ignore[union-attr]
        found = [portion(held, self.gathers.pieces, piece, self.units.get(weight, 1)) for held in theirs]
        if not all(found):
            raise ShardError(f"{node.name}: {count(min(theirs, key=count))} features of its input do not fall into "
                             f"{self.gathers.pieces} pieces; take fewer gather_chunks")
        return found

    def _portions(self, node: fx.Node, piece: int) -> list[Ranges]:
        """The features in a piece of a product: of sums that are scattered those that each peer is to have."""
        own = self.own.hidden(node)
        summed = [((0, shape_of(node)[-1]),) if own is None else own.held]
        wanted = [peer.wanted[node].held for peer in self.peers] if self._reads_hidden(node) else summed
        found = [portion(held, self.loop.pieces, piece) for held in wanted]
        if not all(found):
            raise ShardError(f"{node.name}: its {count(min(wanted, key=count))} features do not fall into "
                             f"{self.loop.pieces} pieces; take fewer chunks")
        return found

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
                raise ShardError(f"{name}: {sizes[dim]} cannot be divided evenly among the ranks that gather it; leave "
                                 "layout out")
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
        """Return the union of the parts of ranks along the wide axis."""
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
            raise ShardError(f"{name} is read by two matmuls that divide it in two ways")

    def _input(self, node: fx.Node) -> None:
        mark, value = node.meta.get(META), node.meta["val"]
        if isinstance(mark, WeightInput) and mark.name in self.cuts.in_pieces:
            self.pieces[node] = [self._another(node, f"{node.name}_piece{i}", mark, piece_name(mark.name, i))
                                 for i in range(self.cuts.in_pieces[mark.name])]
            self.env[node] = self.pieces[node][0]
            return
        new = self.env[node] = copy_node(self.graph, node, {})
        if node.name in self.cuts.heads:
            dim, left = self.cuts.heads[node.name]
            new.meta["val"] = value.new_empty((*value.shape[:dim], left, *value.shape[dim + 1 :]))
        elif isinstance(mark, WeightInput):
            if f"{node.name}_rows" in self.cuts.rows:
                self.head_rows = self._another(node, f"{node.name}_rows", mark, mark.name + ROWS)
            new.meta["val"] = self._part(value, self.cuts.weights.get(mark.name, ()))
            if node in self.tables:
                new.meta[META] = replace(mark, among=mark.among or shape_of(node)[0])
        else:
            new.meta["val"] = self._part(self.all_sequences.of(value), cut_of(self.split[node]))

    def _another(self, node: fx.Node, target: str, mark: WeightInput, name: str) -> fx.Node:
        """A placeholder of a part of a weight, called `name`."""
        new = self.graph.create_node("placeholder", target, name=target)
        new.meta.update(node.meta, val=self._part(node.meta["val"], self.cuts.weights[name]),
                        **{META: replace(mark, name=name)})
        return new

    @staticmethod
    def _part(value: torch.Tensor, cut: WeightCut) -> torch.Tensor:
        shape = list(value.shape)
        for dim, held in cut:
            shape[dim] = count(held)
        return symbolic_value(aten.new_empty.default, (value, shape), {}) if cut else value  # type: ignore[no-any-return]

    def _reads_hidden(self, node: fx.Node) -> bool:
        return self.own.is_hidden(self.split[self.products[node][0]])

    def call(self, target: Callable, args: tuple, like: fx.Node, kwargs: dict[str, Any] | None = None,
             name: str | None = None) -> fx.Node:
        """A node with the value that it gives, in the place of `like`."""
        given, named = map_aggregate((args, kwargs or {}),  # type: ignore[arg-type, misc]
                                     lambda v: v.meta["val"] if isinstance(v, fx.Node) else v)
        new = self.graph.create_node("call_function", target, args, kwargs or {}, name=name)
        new.meta.update({key: value for key, value in like.meta.items() if key != META},
                        val=symbolic_value(target, given, named))
        return new

    def _narrow(self, value: fx.Node, dim: int, held: Ranges, like: fx.Node) -> fx.Node:
        pieces = [self.call(aten.slice.Tensor, (value, dim, first, end), like) for first, end in held]
        return pieces[0] if len(pieces) == 1 else self.call(aten.cat.default, (pieces, dim), like)


def cut_of(split: Split | None) -> WeightCut:
    return () if split is None else ((split.dim, split.held),)
