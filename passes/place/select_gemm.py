"""Choose the implementation of every matrix product from the plan's table."""

from __future__ import annotations

import math

import torch
from torch import fx

from forebay.passes.product_nodes import linear_arguments
from forebay.rewriter.ir import ops
from forebay.rewriter.ir.graph import META, PRODUCT_DTYPES, Gemm
from forebay.rewriter.ir.plan import Plan

aten = torch.ops.aten


def select_gemm(gm: fx.GraphModule, plan: Plan) -> None:
    """Stamp each matrix product with the implementation that the plan's table names for its shape; a shape the table
    does not hold keeps the kernel's own default."""
    table = {(c.dtype, c.m, c.n, c.k): c.impl for c in plan.gemm}
    for node in gm.graph.nodes:
        shape = product_shape(node)
        if shape is not None and shape in table:
            node.meta[META] = Gemm(table[shape])


def product_shape(node: fx.Node) -> tuple[str, int, int, int] | None:
    """(weight dtype, M, N, K) of a product with a weight matrix, or None."""
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
        bits, k, group_size, _ = packing  # type: ignore[misc]
        rows = weight.meta["val"].shape[0]  # type: ignore[union-attr]
        return f"w{bits}g{group_size}", math.prod(x.meta["val"].shape[:-1]), rows, k  # type: ignore[union-attr, return-value]
    value, matrix = x.meta["val"], weight.meta["val"]  # type: ignore[union-attr]
    if matrix.dtype not in PRODUCT_DTYPES:
        return None
    n, k = (matrix.shape if transposed else reversed(matrix.shape))
    return str(matrix.dtype)[6:], math.prod(value.shape[:-1]), n, k
