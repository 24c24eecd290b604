"""The collectives of torch.distributed, as nodes of a rank's graph. What reads a result waits for it; no node says so:
waits are placed when the graph is lowered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from forebay.passes.shard.split import Split, shape_of
from forebay.rewriter.ir.share import RankShare, group_name

aten, functional = torch.ops.aten, torch.ops._c10d_functional


class Collectives:
    """Adds collectives of one rank to its graph; `call` makes a node in the place of another one."""

    def __init__(self, call: Callable[..., fx.Node], share: RankShare) -> None:

        self.call, self.share = call, share

    def summed(self, value: fx.Node, axes: tuple[int, ...], like: fx.Node) -> fx.Node:
        """The sum of what the ranks along `axes` have, on each of them."""
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
        group = group_name(self.share.group(split.axes))
        gathered = self.call(functional.all_gather_into_tensor.default, (value, parts, group), like)
        sizes: list[Any] = [n if isinstance(n, int) else self.call(aten.sym_size.int, (value, i), like)
                            for i, n in enumerate(shape_of(value))]
        apart = self.call(aten.view.default, (gathered, [parts, *sizes]), like)
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(sizes) + 1)]
        beside = self.call(aten.permute.default, (apart, order), like)
        whole = self.call(aten.reshape.default, (beside, [*sizes[:dim], parts * each, *sizes[dim + 1 :]]), like)
        if parts * each == size:
            return whole
        part = self.call(aten.slice.Tensor, (whole, dim, 0, size), like)
        return self.call(aten.clone.default, (part,), like, {"memory_format": torch.contiguous_format})
