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


def is_product(node: fx.Node) -> bool:
    """Whether a product of whole matrices is computed by our kernels: what it reads lies in memory as rows of one
    stride, and its weight is of a dtype that they take or packed; bias [N] + x [M, K] W [K, N] wants W row-major. One
    without multiplications is torch's."""
    linear = linear_arguments(node)
    if linear is not None:
        rows = [value for value in (linear.x, linear.multiplier, linear.residual) if value is not None]
        return all(map(_in_rows, rows)) and has_plain_bias(linear) and not _is_empty(linear.x, linear.weight) and (
            linear.packing is not None or _dtype(linear.weight) in PRODUCT_DTYPES)
    if node.target is not aten.addmm.default or node.kwargs:
        return False
    bias, x, weight = node.args
    return _dtype(weight) in PRODUCT_DTYPES and is_plain_bias(bias, weight.meta["val"].shape[1]) and _in_rows(x) and (  # type: ignore[union-attr]
        bool(weight.meta["val"].is_contiguous()) and not _is_empty(x, weight))  # type: ignore[union-attr]


def _is_empty(x: Any, weight: Any) -> bool:
    return 0 in x.meta["val"].shape or 0 in weight.meta["val"].shape


def has_plain_bias(linear: Linear) -> bool:
    """Whether x W^T has no bias, or one that is a number for each row of W, in order."""
    return linear.bias is None or is_plain_bias(linear.bias, linear.weight.meta["val"].shape[0])


def is_plain_bias(bias: Any, n: int) -> bool:
    """Whether a bias is n numbers in order. torch also spreads one number, and takes steps between them."""
    value = bias.meta["val"]
    return value.dim() == 1 and value.shape[0] == n and bool(value.is_contiguous())


def _dtype(node: Any) -> torch.dtype:
    return node.meta["val"].dtype  # type: ignore[no-any-return]


def _in_rows(x: Any) -> bool:
    """Whether [..., K] can be read as a row-major [M, K] without a copy."""
    value = x.meta["val"]
    if value.dim() < 1 or value.stride(-1) != 1:
        return False
    expected = None
    for size, stride in zip(reversed(value.shape[:-1]), reversed(value.stride()[:-1]), strict=True):
        if size == 1:  # its stride may be anything
            continue
        if expected is not None and stride != expected:
            return False
        expected = stride * size
    return True


def foldable(node: Any) -> Linear | None:
    """The arguments of a product that what follows may be folded into: x and weight of one dtype that our products
    take, and no second reader."""
    found = linear_arguments(node)
    if found is None or found.packing is not None or len(node.users) != 1 or not has_plain_bias(found):
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
