"""Which part of each value within a layer a rank computes: wanted by attention and by products, and traced back."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import fx

from forebay.kernels.operators import EXPERTS, LINEAR_RECURRENCE, SELECTIVE_SCAN, SHORT_CONV, WKV, of_target
from forebay.passes.shard.split import (
    SPLITS,
    ShardError,
    Split,
    dim_of,
    moved_back,
    moves,
    same,
    shape_of,
    sizes_of,
    split_dim,
    together,
)
from forebay.rewriter.ir.graph import weight_name
from forebay.rewriter.ir.products import linear_arguments
from forebay.rewriter.ir.share import RankShare, even_part, ranges

aten = torch.ops.aten
ALIKE = (aten.to.dtype, aten._to_copy.default, aten.clone.default, aten.contiguous.default)  # as pointwise ones
ROW_WISE = (aten.mean.dim, aten.sum.dim_IntList, aten.rms_norm.default, aten.layer_norm.default, aten.softmax.int)
JOINING = (aten.cat.default, aten.stack.default)
HEADS, HEADS_BEHIND = 1, 2  # the dimension of heads of what attention and appends are given, and of what it gives


def product_of(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, bool] | None:
    """x, weight, bias of a product with a weight, and whether the weight is [K, N]; None for other nodes."""
    linear = linear_arguments(node)
    if linear is not None:
        found = linear.x, linear.weight, linear.bias, False
    elif node.target is aten.addmm.default and not node.kwargs:
        found = node.args[1], node.args[2], node.args[0], True  # type: ignore[assignment]
    else:
        return None
    return found if weight_name(found[1]) is not None else None


def table_of(node: fx.Node) -> fx.Node | None:
    """The table of experts, a weight, that a node reads; None for other nodes."""
    table = EXPERTS.argument(node.args, "table") if node.target is EXPERTS.overload else None
    return table if isinstance(table, fx.Node) and weight_name(table) is not None else None


def unknown(node: fx.Node, share: RankShare) -> ShardError:
    """The refusal of an operator of which nobody knows what it makes of parts."""
    other = "batch, which leaves heads together" if share.attention == "heads" else "heads"
    return ShardError(f"{node.name}: {node.target} is not known to work on a part of its operands; take "
                      f"attention={other}, or stages, which divide layers alone")


def over_cache(node: fx.Node) -> list[fx.Node]:
    """Return the operands of an operator over a cache that have heads in dimension 1, without the cache; none for other
    nodes."""
    caches = caches_of(node)
    return [n for n in node.all_input_nodes if n not in caches and len(shape_of(n)) == 4] if caches else []


def caches_of(node: fx.Node) -> list[fx.Node]:
    """The caches that an operator reads or writes."""
    known = of_target(node.target)
    return [] if known is None else known.given_caches(node.args)


def keeps_state(node: fx.Node) -> bool:
    """Return whether an operator of ours keeps a state that is no cache."""
    known = of_target(node.target)
    return known is not None and bool(known.writes) and not known.caches


class StateArguments(NamedTuple):
    """Which argument of a recurrence is its state, which dimension of that has heads or channels, and which arguments
    are vectors or matrices with a row for each."""

    argument: int
    dim: int
    by_row: tuple[int, ...] = ()


STATES = {SHORT_CONV.overload: StateArguments(3, 2, (1, 2)), LINEAR_RECURRENCE.overload: StateArguments(5, 1),
          SELECTIVE_SCAN.overload: StateArguments(5, 1, (2,)), WKV.overload: StateArguments(4, 2, (2, 3))}


def features_of_heads(node: fx.Node) -> int:
    """Return how many features after a recurrence belong together: of the heads that share a head of keys; 1 for
    others."""
    if node.target is not LINEAR_RECURRENCE.overload:
        return 1
    (*_, heads, columns), shared = shape_of(node), shape_of(node.args[0])[2]  # type: ignore[arg-type]
    return int(columns * (heads // shared if shared > 1 else 1))


def recurrent_operands(node: fx.Node, wanted: Split) -> list[tuple[fx.Node, Split]]:
    """The operands of a recurrence that have its heads or channels, `wanted` of its result, and what is wanted of them.
    A head of keys that all share is wanted whole."""
    if node.target is not LINEAR_RECURRENCE.overload:
        return [(operand, wanted) for operand in node.args[: 1 if node.target is SHORT_CONV.overload else 2]]  # type: ignore[misc]
    q, k, v, decay, beta, *_ = node.args
    shared = shape_of(q)[2]  # type: ignore[arg-type]
    keys = [] if shared == 1 else [(each, wanted.over(wanted.size // shared, 2, node)) for each in (q, k)]
    return [*keys, *((each, wanted) for each in (v, decay, beta) if each is not None)]  # type: ignore[list-item]


def is_pointwise(node: fx.Node) -> bool:
    target = node.target
    return target in ALIKE or (isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags)


def heads_of(share: RankShare, axes: tuple[int, ...], heads: int, kv_heads: int) -> tuple[Split, Split]:
    """The heads of queries, and those of keys and values, that a rank attends with. Ranks have heads of keys and values
    of their own as long as there are enough; of more ranks several share one, and divide its queries."""
    parts, index, each = share.size(axes), share.index(axes), heads // kv_heads
    if parts <= kv_heads:
        kv = even_part(kv_heads, parts, index)
        return Split(HEADS, ranges((a * each, b * each) for a, b in kv), heads, axes), Split(HEADS, kv, kv_heads, axes)
    head = next(h for h in range(kv_heads) if index < even_part(parts, kv_heads, h)[0][1])
    first, end = even_part(parts, kv_heads, head)[0]
    own = even_part(each, end - first, index - first)
    if not own:
        raise ShardError(f"{parts} ranks cannot share {heads} heads of attention ({each} for each of {kv_heads} heads "
                         "of keys and values): take fewer ranks")
    queries = ranges((head * each + a, head * each + b) for a, b in own)
    return Split(HEADS, queries, heads, axes), Split(HEADS, ((head, head + 1),), kv_heads, axes)


class Demand:
    """The parts of values of one graph that are `wanted`, as they are pulled."""

    def __init__(self, share: RankShare, recurrences: bool = False) -> None:
        self.share, self.recurrences = share, recurrences
        self.wanted: dict[fx.Node, Split] = {}

    def of_layer(self, gm: fx.GraphModule, units: dict[fx.Node, int], entering: Sequence[fx.Node] = ()) -> None:
        """Pull what attention wants of a layer, and products whose inputs other products made: those sum over what
        ranks divide, in whole `units` of a weight's input features. For attention over the batch the products that are
        `entering` give even parts, and what it gives is handed on in such parts. With `recurrences` products behind
        them want parts as well; else each rank computes all of a recurrence, and of the products around it."""
        axes = self.share.axes
        inner: set[fx.Node] = set()  # made by a product of the layer
        attended: set[fx.Node] = set()  # made by attention, and by no product since
        recurrent: dict[fx.Node, int] = {}  # the same by a recurrence, and features of a unit
        for node in gm.graph.nodes if self.share.attention == "heads" else ():
            for operand in over_cache(node):
                heads = self._heads(node, axes)
                if heads.count < heads.size:
                    self.pull(operand, heads)
                    for sinks in filter(weight_name, node.all_input_nodes):  # a score of each head
                        self.wanted[sinks] = replace(heads, dim=0)
        for node in gm.graph.nodes:
            given, product = over_cache(node), product_of(node)
            if table_of(node) is not None:
                continue  # ranks add up what their experts give
            if product is not None:
                x, weight, *_ = product
                if x in recurrent:
                    if self.recurrences:
                        self.pull(x, self._alike(x, math.lcm(recurrent[x], units.get(weight, 1))))
                    continue
                if x not in inner or (node in self.wanted and x not in attended):  # some heads, of a narrower value
                    inner.add(node)
                elif x not in attended:
                    self.pull(x, self._even(x, units.get(weight, 1)))
                elif self.share.attention == "batch":
                    self.wanted[x] = self._even(x, units.get(weight, 1))
                continue
            if given and node.meta["val"] is not None:
                attended.add(node)
                inner.add(node)
            else:
                attended |= {node} if attended & set(node.all_input_nodes) else set()
                inner |= {node} if inner & set(node.all_input_nodes) else set()
                behind = [recurrent[n] for n in node.all_input_nodes if n in recurrent]
                if keeps_state(node) or behind:
                    recurrent[node] = math.lcm(features_of_heads(node), *behind)
        self._leave_nothing_out()
        for made in entering:
            self.pull(made, self._even(made))

    def _even(self, node: fx.Node, unit: int = 1) -> Split:
        """An even part of the last dimension, in whole units."""
        dim, size, axes = len(shape_of(node)) - 1, shape_of(node)[-1], self.share.axes
        held = even_part(size, self.share.size(axes), self.share.index(axes), unit)
        if not held:
            raise ShardError(f"{node.name}: {size} features are too few for {self.share.size(axes)} ranks")
        return Split(dim, held, size, axes)

    def _alike(self, node: fx.Node, unit: int) -> Split:
        """The same, of as many features as other ranks have."""
        found = self._even(node, unit)
        if found.count * self.share.size(found.axes) != found.size:
            raise ShardError(f"{node.name}: {found.size} features of a recurrence in units of {unit} do not fall into "
                             f"equal parts for {self.share.size(found.axes)} ranks")
        return found

    def _heads(self, node: fx.Node, axes: tuple[int, ...]) -> Split:
        """The heads of what an operator over a cache is given: of queries, or those of the cache."""
        cache = caches_of(node)[0]
        attends = node if node.meta["val"] is not None else next(
            (user for user in cache.users if user.meta["val"] is not None and over_cache(user)), None)
        if attends is None:
            raise ShardError(f"{node.name}: nothing attends over what it appends")
        found = heads_of(self.share, axes, shape_of(over_cache(attends)[0])[HEADS], shape_of(cache)[1])
        return found[0] if node is attends else found[1]

    def _leave_nothing_out(self) -> None:
        """Want whole the pieces of a matmul's result that no rank divides."""
        for node in list(self.wanted):
            for parts in node.users:
                wanted = self.wanted[node]
                if parts.target in SPLITS and split_dim(parts) == wanted.dim:
                    begins = sizes_of(parts)
                    for piece in parts.users:
                        if piece not in self.wanted or self.wanted[piece].dim != wanted.dim:
                            first, end = begins[piece.args[1]], begins[piece.args[1] + 1]  # type: ignore[index, operator]
                            self.pull(node, replace(wanted, held=((first, end),)))

    def pull(self, node: fx.Node, split: Split) -> None:
        """Note that of a value a part is wanted, and so of what it is made of. ShardError where an operator stands
        between that is not known to work on parts."""
        if node.op == "placeholder":
            return  # a weight, or what every rank has whole
        wanted = together(self.wanted.get(node), split, node)
        if wanted == self.wanted.get(node):
            return
        self.wanted[node] = wanted
        if product_of(node) is not None:
            if wanted.dim != len(shape_of(node)) - 1:
                raise ShardError(f"{node.name}: features of a matmul are divided, not dimension {wanted.dim}")
        elif node.target is operator.getitem and isinstance(parts := node.args[0], fx.Node) and parts.target in SPLITS:
            self._pull_piece(node, parts, wanted)
        elif node.target is aten.slice.Tensor and sliced_dim(node) == wanted.dim:
            source = node.args[0]
            self.pull(source, wanted.within(slice_of(node)[0], shape_of(source)[wanted.dim]))  # type: ignore[arg-type]
        elif node.target is aten.expand.default and made_by_expanding(node, wanted.dim):
            return  # of one index, which all ranks have
        elif moves(node):
            self.pull(node.args[0], moved_back(node, wanted))  # type: ignore[arg-type]
        elif is_pointwise(node):
            for operand, dim in aligned_operands(node, wanted.dim):
                self.pull(operand, replace(wanted, dim=dim))
        elif node.target in JOINING and wanted.dim != joined_dim(node):
            for operand in node.all_input_nodes:
                self.pull(operand, replace(wanted, dim=dim_of_joined(node, wanted.dim)))
        elif node.target is aten.cat.default:
            first = 0
            for joined in node.args[0]:  # type: ignore[union-attr]
                part = wanted.among(first, shape_of(joined)[wanted.dim])  # type: ignore[arg-type]
                first += part.size
                if part.count:
                    self.pull(joined, part)  # type: ignore[arg-type]
        elif node.target in STATES and wanted.dim == 2:
            for operand, part in recurrent_operands(node, wanted):
                self.pull(operand, part)
        elif by_rows(node, wanted.dim):
            self.pull(node.args[0], wanted)  # type: ignore[arg-type]
        elif node.target is aten.bmm.default and wanted.dim == 0:
            for operand in node.all_input_nodes:
                self._pull_matrices(operand, wanted)
        elif not over_cache(node):
            raise unknown(node, self.share)

    def _pull_matrices(self, node: fx.Node, wanted: Split) -> None:
        """Pull some matrices of a batch; where they are a weight's, a rank has those rows of it alone."""
        while moves(node) and isinstance(node.args[0], fx.Node):
            node, wanted = node.args[0], moved_back(node, wanted)
        if weight_name(node) is None:
            self.pull(node, wanted)
        else:
            self.wanted[node] = together(self.wanted.get(node), wanted, node)

    def _pull_piece(self, node: fx.Node, parts: fx.Node, wanted: Split) -> None:
        source = parts.args[0]
        assert isinstance(source, fx.Node)
        if split_dim(parts) == wanted.dim:
            wanted = wanted.within(sizes_of(parts)[node.args[1]], shape_of(source)[wanted.dim])  # type: ignore[index]
        self.pull(source, wanted)


def aligned_operands(node: fx.Node, dim: int) -> list[tuple[fx.Node, int]]:
    """The operands of a pointwise operator that have dimension `dim` of its result, not one index for all of it, and
    which of theirs it is."""
    behind = len(shape_of(node)) - dim
    found = []
    for operand in node.all_input_nodes:
        value = operand.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dim() >= behind and same(
                value.shape[value.dim() - behind], node.meta["val"].shape[dim]):
            found.append((operand, value.dim() - behind))
    return found


def by_rows(node: fx.Node, dim: int) -> bool:
    """Return whether an operator does each index of dimension `dim` of its first operand by itself, those of others as
    they are."""
    ndim = len(shape_of(node.args[0]))  # type: ignore[arg-type]
    if node.target is aten.pad.default:
        return dim < ndim - len(node.args[1]) // 2  # type: ignore[arg-type]
    return node.target in ROW_WISE and dim != ndim - 1


def made_by_expanding(node: fx.Node, dim: int) -> bool:
    """Return whether dimension `dim` of what `expand` gives is one index of its operand, or none, many times."""
    given = shape_of(node.args[0])  # type: ignore[arg-type]
    behind = len(shape_of(node)) - dim
    return behind > len(given) or not same(given[-behind], shape_of(node)[dim])


def dim_of_joined(node: fx.Node, dim: int) -> int:
    """Return which dimension of the operands of a node of `JOINING` dimension `dim` of its result is."""
    return dim - (node.target is aten.stack.default and dim > joined_dim(node))


def joined_dim(node: fx.Node) -> int:
    """The dimension of its result along which a node of `JOINING` puts its operands."""
    return dim_of(node.args[1] if len(node.args) > 1 else 0, len(shape_of(node)))


def sliced_dim(node: fx.Node) -> int:
    return dim_of(node.args[1] if len(node.args) > 1 else 0, len(shape_of(node)))


def slice_of(node: fx.Node) -> tuple[int, int]:
    """The first index of a slice of a dimension of fixed size, and how many; ShardError for one that skips some."""
    size = shape_of(node.args[0])[sliced_dim(node)]  # type: ignore[arg-type]
    first, end, step = [*node.args[2:], None, None, None][:3]
    if step not in (None, 1) or not all(isinstance(v, int | None) for v in (first, end)):
        raise ShardError(f"{node.name}: a slice that skips indices of a dimension that ranks divide")
    begin, stop, _ = slice(first, end).indices(size)  # type: ignore[misc]
    return begin, stop - begin
