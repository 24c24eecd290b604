"""Fold the addition of a residual into the product before it."""

from __future__ import annotations

import torch
from torch import fx

from forebay.rewriter.ir.products import Linear, alike, fold, foldable

aten = torch.ops.aten


def fuse_residual(gm: fx.GraphModule) -> None:
    """Make r + (x W^T + b) one product that adds r, of the same shape and dtype, to its result.

    The fused operator rounds as the parts do. Fires only where nothing else reads the product; of two products the
    later takes the sum over.
    """
    graph, changed = gm.graph, False
    for node in list(graph.nodes):
        found = _match(node)
        if found is not None:
            fold(graph, node, found, "fuse_residual")
            changed = True
    if changed:
        graph.eliminate_dead_code()  # it looks at every node twice


def _match(node: fx.Node) -> Linear | None:
    """The product that `node` adds another value to, with that value."""
    if node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(a, fx.Node) for a in node.args):
        return None
    first, second = sorted(node.args)  # type: ignore[type-var]
    for product, other in ((second, first), (first, second)):
        found = foldable(product)
        if found is not None and found.residual is None and product is not other and alike(product, other):
            return found._replace(residual=other)
    return None
