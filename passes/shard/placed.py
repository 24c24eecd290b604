"""How a rank has each value of a graph of which it computes a part."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import fx

from forebay.kernels.operators import LINEAR_RECURRENCE
from forebay.passes.shard.demand import (
    HEADS_BEHIND,
    JOINING,
    STATES,
    by_rows,
    is_pointwise,
    joined_dim,
    over_cache,
    product_of,
    slice_of,
    sliced_dim,
    table_of,
    unknown,
)
from forebay.passes.shard.split import SPLITS, ShardError, Split, moved, moves, shape_of, sizes_of, split_dim
from forebay.passes.shard.statistics import MEANS, NORMS, over_last
from forebay.rewriter.ir.graph import is_pipeline_send
from forebay.rewriter.ir.share import RankShare, even_part, ranges

aten = torch.ops.aten
HIDDEN = "hidden"  # the placeholder of what a layer is given by the one before


class RankSplits:
    """The splits of one graph's values on one rank, from what is `wanted` of them: `split[node]` is None where the rank
    has all of it. `in_layer`: the graph is a layer's, not the step's, whose product of logits is `head`. What stands
    `apart` is computed for some sequences: it is split where the next product wants parts of all of them."""

    def __init__(self, gm: fx.GraphModule, share: RankShare, wanted: Mapping[fx.Node, Split], head: fx.Node | None,
                 in_layer: bool, apart: Collection[fx.Node] = ()) -> None:
        self.share, self.wanted, self.head, self.in_layer, self.apart = share, wanted, head, in_layer, apart
        self.split: dict[fx.Node, Split | None] = {}
        for node in gm.graph.nodes:
            self.split[node] = self._place(node)

    def hidden(self, node: fx.Node) -> Split | None:
        """The part that this rank has of a value as wide as the hidden state."""
        if not self.share.wide:
            return None
        *before, size = shape_of(node)
        wide = self.share.wide
        return Split(len(before), even_part(size, self.share.size(wide), self.share.index(wide)), size, wide)

    def is_hidden(self, split: Split | None) -> bool:
        """Return whether that is a part of a hidden state, not of a value between two matmuls."""
        return split is not None and bool(self.share.wide) and split.axes == self.share.wide

    def _place(self, node: fx.Node) -> Split | None:
        """Return how a rank has a value; None where it has all of it."""
        if node.op == "call_module" or (self.in_layer and node.op == "placeholder" and node.name == HIDDEN):
            return self.hidden(node)
        if node.op == "placeholder":
            return self._told(self.wanted.get(node))
        if node.op != "call_function":
            return None
        if node in self.apart:
            return self.wanted.get(node)
        if is_pipeline_send(node):
            return self.split[node.all_input_nodes[0]]
        if node.target is aten.empty.memory_format:  # what another stage hands on; logits are whole
            given = next(iter(node.users))
            return self.hidden(node) if any(user.op != "output" for user in given.users) else None
        product = product_of(node)
        if product is not None:
            into = self.split[product[0]]
            if not self.in_layer or node is self.head:
                return None  # the head's parts are gathered at once
            return self.hidden(node) if into is not None and not self.is_hidden(into) else self.wanted.get(node)
        attended = over_cache(node)
        if attended:
            split = self.split[attended[0]]
            return None if split is None or node.meta["val"] is None else replace(split, dim=HEADS_BEHIND)
        if table_of(node) is not None:
            if any(self.split[operand] is not None for operand in node.all_input_nodes):
                raise ShardError(f"{node.name}: experts are given whole hidden states, which the layout 2d divides; "
                                 "leave layout out")
            return None
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        split = None if source is None else self.split[source]
        if is_pointwise(node):
            return self._of_operands(node)
        if node.target in STATES:
            return self.split[node.args[2 if node.target is LINEAR_RECURRENCE.overload else 0]]  # type: ignore[index]
        if split is None and node.target not in JOINING:
            return None
        return self._told(self._passed_on(node, split))

    def _joined(self, node: fx.Node, like: Split) -> Split:
        """Return the part of each operand of a concatenation along the dimension that ranks divide."""
        held, first = list[tuple[int, int]](), 0
        for operand in node.args[0]:  # type: ignore[union-attr]
            split, size = self.split[operand], shape_of(operand)[like.dim]  # type: ignore[index, arg-type]
            held += (Split(like.dim, ((0, size),), size, like.axes) if split is None else split).within(first, 0).held
            first += size
        return replace(like, held=ranges(held), size=first)

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
        if target in JOINING:
            found = {part for n in node.all_input_nodes if (part := self.split[n]) is not None}
            made = target is aten.stack.default
            if not made and found and all(part.dim == joined_dim(node) for part in found):
                return self._joined(node, found.pop())
            if len(found) > 1 or any(part.dim == joined_dim(node) for part in found if not made):
                raise ShardError(f"{node.name} puts parts together that ranks divide in two ways")
            part = next(iter(found), None)
            return part and replace(part, dim=part.dim + (made and part.dim >= joined_dim(node)))
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
        if target is aten.gather.default and node.args[1] != split.dim:
            return split
        if self.is_hidden(split) and target in (*NORMS, *MEANS) and over_last(node):
            return split if target in NORMS else None
        if moves(node):
            return moved(node, split)
        if target is aten.bmm.default and split.dim == 0 and split == self.split[node.args[1]]:  # type: ignore[index]
            return split
        if by_rows(node, split.dim):
            return split
        if target is aten.sym_size.int and node.args[1] % len(shape_of(node.args[0])) != split.dim:  # type: ignore[operator, arg-type]
            return None
        raise unknown(node, self.share)
