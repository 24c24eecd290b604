"""Fold activations and gates into the products they follow."""

from __future__ import annotations

import torch
from torch import fx

from forebay.rewriter.ir.products import Linear, alike, fold, foldable

aten = torch.ops.aten
ACTIVATIONS: dict[object, str] = {
    aten.silu.default: "silu", aten.relu.default: "relu", aten.gelu.default: "gelu",
}


def fuse_swiglu(gm: fx.GraphModule) -> None:
    """Make act(x W^T + b) one product, and act(x G^T) * (x U^T) two: the second multiplies by the first's result.

    The fused operator rounds as the parts do. act is silu, gelu (either form) or relu. Fires only where nothing else
    reads the parts; each weight is still read by one product, so that it streams as before.
    """
    graph, changed = gm.graph, False
    for node in list(graph.nodes):
        found = _activated(node) or _multiplied(node)
        if found is not None:
            fold(graph, node, found, "fuse_swiglu")
            changed = True
    if changed:
        graph.eliminate_dead_code()  # it looks at every node twice


def _activated(node: fx.Node) -> Linear | None:
    """The product whose result `node` is the activation of, with that activation."""
    name = ACTIVATIONS.get(node.target)
    product = foldable(node.args[0]) if name is not None and len(node.args) == 1 else None
    if product is None or name is None or product[3:6] != (None, None, ""):
        return None
    if node.kwargs.get("approximate") == "tanh":
        name = "gelu_tanh"
    return product._replace(activation=name)


def _multiplied(node: fx.Node) -> Linear | None:
    """The product that `node` multiplies by another value, with that value: the later one where both are products."""
    if node.target is not aten.mul.Tensor or not all(isinstance(a, fx.Node) for a in node.args):
        return None
    first, second = sorted(node.args)  # type: ignore[type-var]
    for product, other in ((second, first), (first, second)):
        found = foldable(product)
        if found is not None and found[3:6] == (None, None, "") and product is not other and alike(product, other):
            return found._replace(multiplier=other)
    return None
