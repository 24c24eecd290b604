"""Which part of a value a rank has, carried through operators that move elements about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from forebay.rewriter.ir.share import Ranges, count, ranges

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)  # which say the sizes that they make
REGROUPING = (*VIEWS, aten.flatten.using_ints)
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)


class ShardError(ValueError):
    """A graph that cannot be divided so; the message names the operator and what would do."""


@dataclass(frozen=True)
class Split:
    """A part of a value: a rank has the indices `held` of dimension `dim`, of `size` in all; ranks along the mesh's
    `axes` have others."""

    dim: int
    held: Ranges
    size: int
    axes: tuple[int, ...]

    @property
    def count(self) -> int:
        return count(self.held)

    def among(self, first: int, length: int) -> Split:
        """Return the split of the part [first, first + length) of the dimension."""
        cut = ((max(a, first) - first, min(b, first + length) - first) for a, b in self.held)
        return replace(self, held=ranges(cut), size=length)

    def within(self, first: int, size: int) -> Split:
        """Return the split of a dimension of `size`, whose part from `first` on this is."""
        return replace(self, held=tuple((a + first, b + first) for a, b in self.held), size=size)

    def times(self, inner: int, dim: int) -> Split:
        """Return the split after each index becomes `inner` neighbors."""
        return Split(dim, tuple((a * inner, b * inner) for a, b in self.held), self.size * inner, self.axes)

    def over(self, inner: int, dim: int, who: fx.Node) -> Split:
        """Return the split after `inner` neighbors become one index."""
        if self.size % inner or any(edge % inner for piece in self.held for edge in piece):
            raise ShardError(f"{who.name}: a rank's part {self.held} of {self.size} cuts through pieces of {inner} "
                             "that belong together; take another number of ranks")
        return Split(dim, tuple((a // inner, b // inner) for a, b in self.held), self.size // inner, self.axes)


def together(one: Split | None, other: Split, who: fx.Node) -> Split:
    """Return the union of two parts."""
    if one is None:
        return other
    if (one.dim, one.size, one.axes) != (other.dim, other.size, other.axes):
        raise ShardError(f"{who.name} is wanted in two ways: {one} and {other}; it cannot be divided so")
    return replace(one, held=ranges((*one.held, *other.held)))


def shape_of(node: fx.Node) -> list[Any]:
    return list(node.meta["val"].shape)


def dim_of(argument: Any, ndim: int) -> int:
    """A dimension as an operator is given it, counted from the first."""
    return int(argument) % ndim


def same(a: Any, b: Any) -> bool:
    """Return whether two sizes are one number or one symbol."""
    return a == b if isinstance(a, int) and isinstance(b, int) else str(a) == str(b)


def moved(node: fx.Node, split: Split) -> Split:
    """Return how the result of an operator that moves elements about is split, where its first operand is split so."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if node.target in REGROUPING:
        return _regrouped(node, split, shape_of(source), shape_of(node))
    for to, origin in enumerate(_origins(node, len(shape_of(source)))):
        if origin == split.dim:
            return replace(split, dim=to)
    raise ShardError(f"{node.name} takes single indices of a dimension that ranks divide")


def moved_back(node: fx.Node, split: Split) -> Split:
    """Return how the first operand of such an operator must be split for its result to be split so."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if node.target in REGROUPING:
        return _regrouped(node, split, shape_of(node), shape_of(source))
    origin = _origins(node, len(shape_of(source)))[split.dim]
    if origin is None:
        raise ShardError(f"{node.name} makes the dimension that ranks would divide")
    return replace(split, dim=origin)


def moves(node: fx.Node) -> bool:
    """Return whether `moved` knows the operator."""
    return node.target in REGROUPING or node.target in _ORIGINS


def _origins(node: fx.Node, ndim: int) -> list[int | None]:
    """For each dimension of the result the one of the operand that it is."""
    return _ORIGINS[node.target](node, ndim)  # type: ignore[index]


def _transposed(node: fx.Node, ndim: int) -> list[int | None]:
    order: list[int | None] = list(range(ndim))
    a, b = (dim_of(dim, ndim) for dim in node.args[1:3])
    order[a], order[b] = order[b], order[a]
    return order


def _unsqueezed(node: fx.Node, ndim: int) -> list[int | None]:
    order: list[int | None] = list(range(ndim))
    order.insert(dim_of(node.args[1], ndim + 1), None)
    return order


def _without(node: fx.Node, ndim: int) -> list[int | None]:
    gone = dim_of(node.args[1], ndim)
    return [i for i in range(ndim) if i != gone]


def _sliced(node: fx.Node, ndim: int) -> list[int | None]:
    at = dim_of(node.args[1] if len(node.args) > 1 else 0, ndim)
    return [None if i == at else i for i in range(ndim)]


def _spread(node: fx.Node, ndim: int) -> list[int | None]:
    more = len(shape_of(node)) - ndim
    return [None] * more + list(range(ndim))


_ORIGINS = {
    aten.transpose.int: _transposed,
    aten.permute.default: lambda node, ndim: [dim % ndim for dim in node.args[1]],
    aten.unsqueeze.default: _unsqueezed,
    aten.squeeze.dim: _without,
    aten.select.int: _without,
    aten.slice.Tensor: _sliced,
    aten.expand.default: _spread,
    aten.view_as_real.default: lambda node, ndim: [*range(ndim), None],
    aten.view_as_complex.default: lambda node, ndim: [*range(ndim - 1)],
}


def _regrouped(node: fx.Node, split: Split, before: list[Any], after: list[Any]) -> Split:
    """The split through a change of shape: dimensions that stay map one to one, from the left and then from the right;
    those between are one group, whose outermost may be divided, or whose only one becomes several."""
    own = len(_wide(before[: split.dim]))
    places = _wide(after)  # dimensions of one index come and go
    found = _regrouped_wide(node, replace(split, dim=own), [before[i] for i in _wide(before)],
                            [after[i] for i in places])
    return replace(found, dim=places[found.dim])


def _wide(sizes: Sequence[Any]) -> list[int]:
    """Dimensions of more than one index; no symbol stands for one."""
    return [i for i, size in enumerate(sizes) if not (isinstance(size, int) and size == 1)]


def _regrouped_wide(node: fx.Node, split: Split, before: list[Any], after: list[Any]) -> Split:
    left = 0
    while left < min(len(before), len(after)) and same(before[left], after[left]):
        left += 1
    right = 0
    while right < min(len(before), len(after)) - left and same(before[-1 - right], after[-1 - right]):
        right += 1
    if split.dim < left:
        return split
    if split.dim >= len(before) - right:
        return replace(split, dim=split.dim + len(after) - len(before))
    middle, made = before[left : len(before) - right], after[left : len(after) - right]
    at, symbols = split.dim - left, 0
    while middle and not isinstance(middle[0], int):  # of [B * S, N] and [B, S, H, D] the symbols are one group
        middle, at = middle[1:], at - 1
    while made and not isinstance(made[0], int):
        made, left, symbols = made[1:], left + 1, symbols + 1
    return _one_group(node, split, at, middle, made, left, symbols)


def _one_group(
    node: fx.Node, split: Split, at: int, before: list[Any], after: list[Any], left: int, symbols: int
) -> Split:
    """The split of the outermost of sizes `before` that become `after`. Of [B, S, H, D] and [B * S * H, D] the heads
    are in the last of the `symbols` before or after: that dimension is split then."""
    if all(isinstance(size, int) for size in (*before, *after)):
        had, has = math.prod(before), math.prod(after)
        if at == -1 and after and has == split.size * had:
            return split.times(had, left).over(math.prod(after[1:]), left, node)
        if at == 0 and had == has:
            return split.times(math.prod(before[1:]), left).over(math.prod(after[1:]), left, node)
        if at == 0 and symbols and had % has == 0:
            return split.times(math.prod(before[1:]), left).over(has, left - 1, node)
    raise ShardError(f"{node.name} puts a dimension that ranks divide among others ({before} to {after})")


def sizes_of(node: fx.Node) -> Sequence[int]:
    """Return the starts of a split's or chunk's pieces along its dimension, and the end of the last."""
    source, given = node.args[:2]
    dim = split_dim(node)
    size = shape_of(source)[dim]  # type: ignore[arg-type]
    if node.target is aten.split_with_sizes.default:
        lengths = list(given)  # type: ignore[arg-type]
    else:
        each = given if node.target is aten.split.Tensor else -(-size // given)  # type: ignore[operator]
        lengths = [min(each, size - at) for at in range(0, size, each)]  # type: ignore[arg-type, type-var]
    begins = [0]
    for length in lengths:
        begins.append(begins[-1] + length)
    return begins


def split_dim(node: fx.Node) -> int:
    return dim_of(node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0), len(shape_of(node.args[0])))  # type: ignore[arg-type]
