"""Products with a weight matrix, as the passes know them: `aten.linear`, and `forebay::linear` with what follows it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from forebay.kernels.formats.packing import Packing
from forebay.kernels.operators import LINEAR, LINEAR_Q
from forebay.rewriter.ir.graph import PRODUCT_DTYPES

aten = torch.ops.aten


class Linear(NamedTuple):
    """The arguments of a product: act(x W^T + bias) * multiplier + residual."""

    x: Any
    weight: Any
    bias: Any = None
    multiplier: Any = None
    residual: Any = None
    activation: str = ""
    packing: Packing | None = None  # where weight is packed rows


def linear_arguments(node: Any) -> Linear | None:
    """The arguments of a product x W^T, however it is written, or None for another node."""
    if not isinstance(node, fx.Node) or node.kwargs:
        return None
    if node.target in (aten.linear.default, LINEAR.overload):
        return Linear(*node.args)  # type: ignore[arg-type]
    if node.target is LINEAR_Q.overload:
        return Linear(*node.args[:6])._replace(packing=Packing(*node.args[6:]))  # type: ignore[arg-type]
    return None


def foldable(node: Any) -> Linear | None:
    """The arguments of a product that what follows may be folded into: x and weight of one dtype that our products
    take, and no second reader."""
    found = linear_arguments(node)
    if found is None or found.packing is not None or len(node.users) != 1:
        return None
    dtypes = {value.meta["val"].dtype for value in found[:3] if value is not None}
    return found if len(dtypes) == 1 and dtypes <= set(PRODUCT_DTYPES) else None


def fold(graph: fx.Graph, node: fx.Node, arguments: Linear, made_by: str) -> None:
    """Put the product `arguments` in the place of `node`, the last operator that it takes over."""
    with graph.inserting_before(node):
        operator, packing = (LINEAR, ()) if arguments.packing is None else (LINEAR_Q, arguments.packing)
        fused = graph.call_function(operator.overload, (*arguments[:6], *packing))
    fused.meta = {**node.meta, "made_by": made_by}
    node.replace_all_uses_with(fused)
    graph.erase_node(node)


def alike(a: Any, b: Any) -> bool:
    """Whether two values have one dtype and one shape, symbol by symbol where sizes are symbols."""
    one, other = a.meta["val"], b.meta["val"]
    return one.dtype == other.dtype and [str(s) for s in one.shape] == [str(s) for s in other.shape]
