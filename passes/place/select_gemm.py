"""Choose the implementation of every matrix product from the plan's table."""

from __future__ import annotations

from torch import fx

from forebay.rewriter.ir.graph import META, Gemm
from forebay.rewriter.ir.plan import Plan, PlanError
from forebay.rewriter.ir.products import product_shape


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
            raise PlanError(f"plan.gemm: {node.name} is a matmul of {dtype} with m={m}, n={n}, k={k}, for which the "
                            "plan names no implementation; add one, or plan again")
        node.meta[META] = Gemm(table[shape])
