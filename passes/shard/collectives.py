"""The collectives of torch.distributed, as nodes of a rank's graph. What reads a result waits for it; no node says so:
waits are placed when the graph is lowered."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from forebay.passes.shard.split import Split, shape_of
from forebay.rewriter.ir.share import Ranges, RankShare, count, group_name, ranges

aten, functional = torch.ops.aten, torch.ops._c10d_functional
ByRank = Sequence[Sequence[Ranges]]  # of each rank, by value, the indices of its last dimension that it has


class Collectives:
    """Adds collectives of one rank to its graph; `call` makes a node in the place of another one."""

    def __init__(self, call: Callable[..., fx.Node], share: RankShare) -> None:

        self.call, self.share = call, share

    def summed(self, value: fx.Node, axes: tuple[int, ...], like: fx.Node) -> fx.Node:
        """The sum of what the ranks along `axes` have, on each of them."""
        if self.share.size(axes) == 1:
            return value
        group = group_name(self.share.group(axes))
        return self.call(functional.all_reduce.default, (value, "sum", group), like)

    def gathered(self, value: fx.Node, split: Split, like: fx.Node) -> fx.Node:
        """All of a value of which each rank has one range of a dimension, equal ones but for the last. What is sent is
        as long on all ranks: a shorter one fills it with anything, which nobody sees."""
        parts, size = self.share.size(split.axes), split.size
        each, dim = -(-size // parts), split.dim
        if split.count < each:
            filler = self.call(aten.slice.Tensor, (value, dim, 0, each - split.count), like)
            value = self.call(aten.cat.default, ([value, filler], dim), like)
        apart = self.every(value, split.axes, like)
        sizes: list[Any] = self.sizes(value, like)
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(sizes) + 1)]
        beside = self.call(aten.permute.default, (apart, order), like)
        whole = self.call(aten.reshape.default, (beside, [*sizes[:dim], parts * each, *sizes[dim + 1 :]]), like)
        if parts * each == size:
            return whole
        part = self.call(aten.slice.Tensor, (whole, dim, 0, size), like)
        return self.dense(part, like)

    def every(self, value: fx.Node, axes: tuple[int, ...], like: fx.Node) -> fx.Node:
        """The values [...] of all ranks along `axes`, in one [ranks, ...]."""
        ranks, group = self.share.size(axes), group_name(self.share.group(axes))
        gathered = self.call(functional.all_gather_into_tensor.default, (value, ranks, group), like)
        return self.call(aten.view.default, (gathered, [ranks, *self.sizes(value, like)]), like)

    def whole(self, part: fx.Node, along: Mapping[int, tuple[tuple[int, ...], int]], like: fx.Node) -> fx.Node:
        """All of a weight, in one exchange: along each dimension in `along` the ranks of some axes have equal parts of
        so many equal stretches of it."""
        axes = tuple(sorted({axis for over, _ in along.values() for axis in over}))
        shape, (apart, order, made) = self.share.shape, [list[int]() for _ in range(3)]
        for dim, size in enumerate(shape_of(part)):
            over, stretches = along.get(dim, ((), 1))
            if stretches > 1:
                order.append(len(axes) + len(apart))
                apart.append(stretches)
            order += [*map(axes.index, over), len(axes) + len(apart)]
            apart.append(size // stretches)
            made.append(size * self.share.size(over))
        every = self.call(aten.view.default, (self.every(part, axes, like), [*(shape[i] for i in axes), *apart]), like)
        if order != sorted(order):
            every = self.call(aten.permute.default, (every, order), like)
        return self.call(aten.reshape.default, (every, made), like)

    def scattered(self, values: Sequence[fx.Node], parts: ByRank, axes: tuple[int, ...], like: fx.Node
                  ) -> list[fx.Node]:
        """Return the sums of this rank's parts of values that are added up over the ranks along `axes`, in one
        exchange. Each value has the indices that any of these ranks is to have."""
        each = widest(parts)
        whole = [ranges(piece for theirs in parts for piece in theirs[i]) for i in range(len(values))]
        chunks = [self._filled([(value, positions(held, part)) for value, held, part in
                                zip(values, whole, theirs, strict=True)], each, like) for theirs in parts]
        sent = self.call(aten.cat.default, (chunks, 0), like)
        group = group_name(self.share.group(axes))
        made = self.call(functional.reduce_scatter_tensor.default, (sent, "sum", len(parts), group), like)
        own = [count(part) for part in parts[self.share.index(axes)]]
        if own == [each]:
            return [made]
        begins = [sum(own[:i]) for i in range(len(own))]
        return [self.dense(self.call(aten.slice.Tensor, (made, -1, a, a + n), like), like)
                for a, n in zip(begins, own, strict=True)]

    def joined(self, values: Sequence[fx.Node], held: Sequence[Ranges], parts: ByRank, axes: tuple[int, ...],
               like: fx.Node) -> fx.Node:
        """Return the indices of values that are in any `parts` of the ranks along `axes`, in one exchange; this rank
        has `held`, as each has them, [ranks, ...]: `beside_each_other` puts them together."""
        each = widest(parts)
        own = [(value, ranges(positions(mine, part))) for value, mine, part in zip(
            values, held, parts[self.share.index(axes)], strict=True)]
        return self.every(self._filled(own, each, like), axes, like)

    def of_sequences(self, values: Sequence[fx.Node], parts: ByRank, like: fx.Node) -> list[fx.Node]:
        """Return all features of this rank's sequences, in one exchange, from values [sequences, ..., features] of
        which each rank has some features of all sequences."""
        each = widest(parts)
        own = [(value, ((0, count(part)),)) for value, part in zip(values, parts[self.share.index(self.share.axes)],
                                                                   strict=True)]
        return self.beside_each_other(self._passed(self._filled(own, each, like), like), parts, like)

    def of_features(self, value: fx.Node, parts: Sequence[Ranges], like: fx.Node) -> fx.Node:
        """Return this rank's part of the features of all ranks' sequences, one after the other: the inverse of
        `of_sequences`, for a value [sequences, ..., features] with all features of this rank's sequences."""
        each, own = max(map(count, parts)), count(parts[self.share.index(self.share.axes)])
        chunks = [self._filled([(value, part)], each, like, dense=False) for part in parts]
        rows, *sizes = self.sizes(value, like)
        every = self._passed(self.call(aten.cat.default, (chunks, 0), like), like)
        made = self.call(aten.view.default, (every, [self.times(rows, len(parts), like), *sizes[:-1], each]), like)
        if own == each:
            return made
        return self.dense(self.call(aten.slice.Tensor, (made, -1, 0, own), like), like)

    def _passed(self, value: fx.Node, like: fx.Node) -> fx.Node:
        """Return the rows that each rank has for this one, of a value with equal rows for each rank, [ranks, rows,
        ...]."""
        axes = self.share.axes
        ranks, group = self.share.size(axes), group_name(self.share.group(axes))
        rows, *sizes = self.sizes(value, like)
        apart = self.call(aten.view.default, (value, [ranks, self.over(rows, ranks, like), *sizes]), like)
        return self.call(functional.all_to_all_single.default, (apart, [1] * ranks, [1] * ranks, group), like)

    def over(self, size: Any, ranks: int, like: fx.Node) -> Any:
        """A size over a number."""
        return self.call(operator.floordiv, (size, ranks), like) if isinstance(size, fx.Node) else size // ranks

    def times(self, size: Any, ranks: int, like: fx.Node) -> Any:
        """A size times a number."""
        return self.call(operator.mul, (size, ranks), like) if isinstance(size, fx.Node) else size * ranks

    def beside_each_other(self, every: fx.Node, parts: ByRank, like: fx.Node) -> list[fx.Node]:
        """Values whose parts, as each rank has them, stand in [ranks, ...]."""
        ranks = [self.call(aten.select.int, (every, 0, rank), like) for rank in range(len(parts))]
        found = []
        for i in range(len(parts[0])):
            pieces = []
            for rank, theirs in enumerate(parts):
                at = sum(count(part) for part in theirs[:i])
                for first, end in theirs[i]:
                    pieces.append((first, rank, at, at + end - first))
                    at += end - first
            found.append(self.beside([self.call(aten.slice.Tensor, (ranks[rank], -1, a, b), like)
                                       for _, rank, a, b in sorted(pieces)], like))
        return found

    def _filled(self, pieces: Sequence[tuple[fx.Node, Ranges]], each: int, like: fx.Node, dense: bool = True
                ) -> fx.Node:
        """Pieces of values beside each other, and behind them anything up to `each` indices: the first piece again."""
        wanted = [(value, first, end) for value, held in pieces for first, end in held]
        short = each - sum(count(held) for _, held in pieces)
        while short:
            value, first, end = wanted[0]
            wanted.append((value, first, min(end, first + short)))
            short -= wanted[-1][2] - first
        return self.beside([value if shape_of(value)[-1] == end - first else self.call(
            aten.slice.Tensor, (value, -1, first, end), like) for value, first, end in wanted], like, dense)

    def beside(self, pieces: Sequence[fx.Node], like: fx.Node, dense: bool = True) -> fx.Node:
        """Pieces of a value's last dimension as one."""
        if len(pieces) == 1:
            return self.dense(pieces[0], like) if dense else pieces[0]
        return self.call(aten.cat.default, (list(pieces), -1), like)

    def dense(self, value: fx.Node, like: fx.Node) -> fx.Node:
        if value.target not in (aten.slice.Tensor, aten.select.int):
            return value
        return self.call(aten.clone.default, (value,), like, {"memory_format": torch.contiguous_format})

    def sizes(self, value: fx.Node, like: fx.Node) -> list[Any]:
        """The sizes of a value, numbers or nodes that give them; where one token of each sequence is chosen -1, which
        stands for what is left: steps that check drafts have all there (`every_position`)."""
        found = [n if isinstance(n, int) else self.call(aten.sym_size.int, (value, i), like)
                 for i, n in enumerate(shape_of(value))]
        return [found[0], -1, *found[2:]] if len(found) == 3 and found[1] == 1 else found


def widest(parts: ByRank) -> int:
    """The most indices that a rank has of all values together."""
    return max(sum(count(part) for part in theirs) for theirs in parts)


def positions(held: Ranges, part: Ranges) -> Ranges:
    """Return the positions of the indices of `part` among those `held`, which has them all."""
    found = []
    for first, end in part:
        before = sum(b - a for a, b in held if b <= first)
        inside = next(a for a, b in held if a <= first and end <= b)
        found.append((before + first - inside, before + end - inside))
    return tuple(found)


def stretches_of(wanted: Ranges, part: Ranges, parts: int, index: int) -> int:
    """Into how many equal stretches `wanted` falls of which `part` is number `index` of `parts` equal parts each; 0
    where it is nothing of the kind."""
    if parts == 1:
        return int(part == wanted)
    inside = all(any(a <= first and end <= b for a, b in wanted) for first, end in part)
    each = count(part) // len(part)
    even = tuple((each * at, each * (at + 1)) for at in range(index, parts * len(part), parts))
    return len(part) if inside and parts * count(part) == count(wanted) and positions(wanted, part) == even else 0
