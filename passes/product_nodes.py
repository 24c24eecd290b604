"""Products with a weight matrix, as the passes know them: `aten.linear`, and `forebay::linear` with what follows it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from forebay.rewriter.ir.graph import PRODUCT_DTYPES

aten = torch.ops.aten


PACKED = {"forebay.linear_w4.default": 4, "forebay.linear_w8.default": 8}


class Linear(NamedTuple):
    """The arguments of a product: act(x W^T + bias) * multiplier + residual."""

    x: Any
    weight: Any
    bias: Any = None
    multiplier: Any = None
    residual: Any = None
    activation: str = ""
    packing: tuple[int, int, int, torch.dtype] | None = None  # packed rows: bits, K, group size, dtype of scales


def linear_arguments(node: Any) -> Linear | None:
    """The arguments of a product x W^T, however it is written, or None for another node."""
    if not isinstance(node, fx.Node) or node.kwargs:
        return None
    if node.target is aten.linear.default or str(node.target) == "forebay.linear.default":
        return Linear(*node.args)  # type: ignore[arg-type]
    bits = PACKED.get(str(node.target))
    if bits is not None:
        x, rows, bias, residual, in_features, group_size, activation, scale_dtype, *rest = node.args
        multiplier = rest[0] if rest else None
        return Linear(x, rows, bias, multiplier, residual, activation, (bits, in_features, group_size, scale_dtype))  # type: ignore[arg-type]
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
        if arguments.packing is None:
            fused = graph.call_function(torch.ops.forebay.linear.default, tuple(arguments[:6]))
        else:
            bits, in_features, group_size, scale_dtype = arguments.packing
            x, rows, bias, multiplier, residual, activation, _ = arguments
            target = torch.ops.forebay.linear_w4 if bits == 4 else torch.ops.forebay.linear_w8
            fused = graph.call_function(
                target.default, (x, rows, bias, residual, in_features, group_size, activation, scale_dtype, multiplier))
    fused.meta = {**node.meta, "made_by": made_by}
    node.replace_all_uses_with(fused)
    graph.erase_node(node)


def alike(a: Any, b: Any) -> bool:
    """Whether two values have one dtype and one shape, symbol by symbol where sizes are symbols."""
    one, other = a.meta["val"], b.meta["val"]
    return one.dtype == other.dtype and [str(s) for s in one.shape] == [str(s) for s in other.shape]
