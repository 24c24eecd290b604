"""Products with a weight matrix, as the passes know them: `aten.linear`, and `forebay::linear` with what follows it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import fx

from forebay.kernels.formats.packing import Packing
from forebay.kernels.operators import EXPERTS, LINEAR, LINEAR_Q
from forebay.rewriter.ir import ops
from forebay.rewriter.ir.graph import META, PRODUCT_DTYPES, WeightInput

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
    """Tell whether our kernels compute a product of whole matrices: its operands lie as the operator's record says, and
    its weight is a matrix of a dtype that they take, or packed. Products of empty matrices are torch's."""
    linear = linear_arguments(node)
    if linear is None and node.target is aten.addmm.default and not node.kwargs:
        bias, x, weight = node.args
        if not is_plain_bias(bias, weight.meta["val"].shape[1]):  # type: ignore[union-attr]
            return False
        linear = Linear(x, weight, bias)
    elif linear is None or not has_plain_bias(linear):
        return False
    return (linear.weight.meta["val"].dim() == 2 and _lies_in_rows(linear) and not _is_empty(linear.x, linear.weight)
            and (linear.packing is not None or _dtype(linear.weight) in PRODUCT_DTYPES))


def _lies_in_rows(linear: Linear) -> bool:
    """Return whether the operands lie as the product's record says."""
    operator = LINEAR if linear.packing is None else LINEAR_Q
    return operator.accepts(tuple(None if value is None else value.meta["val"] for value in linear[:5]))


def _is_empty(x: Any, weight: Any) -> bool:
    return 0 in x.meta["val"].shape or 0 in weight.meta["val"].shape


def has_plain_bias(linear: Linear) -> bool:
    """Return whether x W^T has no bias, or one that is a number for each row of W, in order."""
    return linear.bias is None or is_plain_bias(linear.bias, linear.weight.meta["val"].shape[0])


def is_plain_bias(bias: Any, n: int) -> bool:
    """Return whether a bias is n numbers in order. torch also spreads one number, and takes steps between them."""
    value = bias.meta["val"]
    return value.dim() == 1 and value.shape[0] == n and bool(value.is_contiguous())


def _dtype(node: Any) -> torch.dtype:
    return node.meta["val"].dtype  # type: ignore[no-any-return]


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
    """Return whether two values have one dtype and one shape, symbol by symbol where sizes are symbols."""
    one, other = a.meta["val"], b.meta["val"]
    return one.dtype == other.dtype and [str(s) for s in one.shape] == [str(s) for s in other.shape]


Shape = tuple[str, int, int, int]  # dtype of the weight, or its format where it is packed rows; M, N, K


def product_shape(node: fx.Node) -> Shape | None:
    """The shape of a product that our kernels compute, or of a tile of one; else None."""
    if node.target not in ops.TILES and not is_product(node):
        return None
    linear = linear_arguments(node)
    if linear is not None:
        x, weight, transposed = linear.x, linear.weight, True
    elif node.target is aten.addmm.default:
        x, weight, transposed = node.args[1], node.args[2], False
    elif node.target in (ops.linear_tile, ops.matmul_tile):
        x, weight, transposed = node.args[1], node.args[2], node.target is ops.linear_tile
    else:
        return None
    packing = linear.packing if linear is not None else node.args[8] if len(node.args) > 8 else None
    if packing is not None:
        stored, rows = Packing(*packing), weight.meta["val"].shape[0]  # type: ignore[misc, arg-type, union-attr]
        return stored.format, math.prod(x.meta["val"].shape[:-1]), rows, stored.in_features  # type: ignore[union-attr]
    value, matrix = x.meta["val"], weight.meta["val"]  # type: ignore[union-attr]
    if matrix.dtype not in PRODUCT_DTYPES:
        return None
    n, k = (matrix.shape if transposed else reversed(matrix.shape))
    return str(matrix.dtype)[6:], math.prod(value.shape[:-1]), n, k


def reads_table(user: fx.Node, weight: fx.Node) -> bool:
    """Return whether `weight` is the table of experts that `user` reads, an entry a row."""
    return user.target is EXPERTS.overload and EXPERTS.argument(user.args, "table") is weight


def experts_among(table: Any) -> dict[str, int]:
    """Return the argument of a launch whose router picks from more experts than its table has (`WeightInput`)."""
    mark = table.meta.get(META)
    return {"among": mark.among} if isinstance(mark, WeightInput) and mark.among else {}


def tileable(user: fx.Node, weight: fx.Node) -> bool:
    """Return whether `user` can be computed from row tiles of `weight`: a matrix product, or one with experts."""
    if reads_table(user, weight):
        return user.args.count(weight) == 1
    linear = linear_arguments(user)
    if weight.meta["val"].dtype not in PRODUCT_DTYPES and (linear is None or linear.packing is None):
        return False
    if linear is not None:
        read = [value for value in (linear.x, linear.multiplier, linear.residual) if value is not None]
        return linear.weight is weight and weight.meta["val"].dim() == 2 and all(map(_is_rows, read)) and (
            weight not in (*read, linear.bias) and has_plain_bias(linear))
    if user.target is aten.addmm.default:
        bias, x, matrix = user.args
        return matrix is weight and x is not weight and not user.kwargs and _is_rows(x) and (
            isinstance(bias, fx.Node) and bias is not weight and is_plain_bias(bias, weight.meta["val"].shape[1]))
    if user.target in (aten.mm.default, aten.matmul.default):
        return user.args[1] is weight and user.args[0] is not weight and weight.meta["val"].dim() == 2 and (
            _is_rows(user.args[0]))
    return False


def _is_rows(x: Any) -> bool:
    """Return whether x [..., K] is rows [M, K] as the product's record says: tiles are computed without a copy of
    it."""
    value = x.meta["val"]
    return value.dim() > 1 and value.shape[-1] > 0 and LINEAR.accepts((value,))
