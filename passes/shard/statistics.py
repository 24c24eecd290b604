"""Norms of a hidden state of which ranks have parts: each sums over its own, and one exchange makes them whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from forebay.passes.shard.collectives import Collectives
from forebay.passes.shard.split import ShardError, Split, dim_of, shape_of

aten = torch.ops.aten
NORMS = (aten.layer_norm.default, aten.rms_norm.default)  # whose results are split as what they are given
MEANS = (aten.mean.dim, aten.sum.dim_IntList)  # whose results are whole


def over_last(node: fx.Node) -> bool:
    """Return whether a norm or a mean takes all of the last dimension, and nothing else."""
    ndim = len(shape_of(node.args[0]))  # type: ignore[arg-type]
    dims = node.args[1]
    return len(dims) == 1 if node.target in NORMS else [dim_of(dim, ndim) for dim in dims] == [ndim - 1]  # type: ignore[arg-type, union-attr]


def whole_mean(node: fx.Node, x: fx.Node, split: Split, exchange: Collectives) -> fx.Node:
    """The mean or sum of a part's last dimension, as of all of it."""
    call: Callable[..., fx.Node] = exchange.call
    own = call(node.target, (x, *node.args[1:]), node, dict(node.kwargs))
    if node.target is aten.mean.dim:
        own = call(aten.mul.Tensor, (own, split.count / split.size), node)
    return exchange.summed(own, split.axes, node)


def normed(node: fx.Node, x: fx.Node, split: Split, exchange: Collectives) -> fx.Node:
    """A part of a norm's operand, float32, with the mean (but of `rms_norm`) and the scale of the whole. Variances are
    those within the ranks' equal parts and that between their means, so that nothing cancels."""
    call: Callable[..., fx.Node] = exchange.call
    given = x.meta["val"].dtype
    wide = x if given == torch.float32 else call(aten.to.dtype, (x, torch.float32), node)
    if node.target is aten.rms_norm.default:
        squares = call(aten.mean.dim, (call(aten.mul.Tensor, (wide, wide), node), [-1], True), node)
        mine = call(aten.mul.Tensor, (squares, split.count / split.size), node)
        variance, centred = exchange.summed(mine, split.axes, node), wide
    else:
        if split.count * exchange.share.size(split.axes) != split.size:
            raise ShardError(f"{node.name}: a hidden size of {split.size} cannot be divided evenly among "
                             f"{exchange.share.size(split.axes)} ranks; take another mesh")
        mean = call(aten.mean.dim, (wide, [-1], True), node)
        apart = call(aten.sub.Tensor, (wide, mean), node)
        within = call(aten.mean.dim, (call(aten.mul.Tensor, (apart, apart), node), [-1], True), node)
        every = exchange.every(call(aten.cat.default, ([mean, within], -1), node), split.axes, node)
        means = call(aten.slice.Tensor, (every, -1, 0, 1), node)
        centre, inner = (call(aten.mean.dim, (part, [0]), node) for part in (
            means, call(aten.slice.Tensor, (every, -1, 1, 2), node)))
        off = call(aten.sub.Tensor, (means, centre), node)
        between = call(aten.mean.dim, (call(aten.mul.Tensor, (off, off), node), [0]), node)
        variance = call(aten.add.Tensor, (inner, between), node)
        centred = call(aten.sub.Tensor, (wide, centre), node)
    scale = call(aten.rsqrt.default, (call(aten.add.Tensor, (variance, epsilon_of(node)), node),), node)
    return call(aten.mul.Tensor, (centred, scale), node)


def weighted(node: fx.Node, made: fx.Node, vectors: Sequence[fx.Node | None], dtype: torch.dtype, exchange: Collectives
             ) -> fx.Node:
    """Apply a norm's weight and bias (`vectors`, the parts of this rank) to `normed`."""
    call: Callable[..., fx.Node] = exchange.call
    if vectors[0] is not None:
        made = call(aten.mul.Tensor, (made, vectors[0]), node)
    if len(vectors) > 1 and vectors[1] is not None:
        made = call(aten.add.Tensor, (made, vectors[1]), node)
    return made if dtype == torch.float32 else call(aten.to.dtype, (made, dtype), node)


def epsilon_of(node: fx.Node) -> float:
    """Return the epsilon of a norm."""
    at = 4 if node.target is aten.layer_norm.default else 3
    found: Any = node.args[at] if len(node.args) > at else node.kwargs.get("eps")
    if found is None:
        return 1e-5 if node.target is aten.layer_norm.default else torch.finfo(node.meta["val"].dtype).eps
    return float(found)
