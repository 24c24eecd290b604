"""Choose the implementation of every matrix product from the plan's table."""

from __future__ import annotations

import math

import torch
from torch import fx

from forebay.kernels.formats.packing import Packing
from forebay.passes.product_nodes import is_product, linear_arguments
from forebay.rewriter.ir import ops
from forebay.rewriter.ir.graph import META, PRODUCT_DTYPES, Gemm
from forebay.rewriter.ir.plan import Plan, PlanError

aten = torch.ops.aten


Shape = tuple[str, int, int, int]  # dtype of the weight, or its format where it is packed rows; M, N, K


def select_gemm(gm: fx.GraphModule, plan: Plan) -> None:
    """Stamp each matrix product with the implementation that the plan's table names for its shape; PlanError for a
    shape that the table does not hold."""
    table = {(c.dtype, c.m, c.n, c.k): c.impl for c in plan.gemm}
    for node in gm.graph.nodes:
        shape = product_shape(node)
        if shape is None:
            continue
        if shape not in table:
            dtype, m, n, k = shape
            raise PlanError(f"plan.gemm: {node.name} is a product of {dtype} with m={m}, n={n}, k={k}, for which the "
                            "plan names no implementation; add one, or plan again")
        node.meta[META] = Gemm(table[shape])


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
