"""Layers whose attention sees the tokens that an indexer chooses."""

from __future__ import annotations

from torch import fx

from forebay.kernels.operators import CHOOSE_TOKENS
from forebay.rewriter.ir.graph import block_graphs


def least_chosen(step: fx.GraphModule) -> int:
    """The fewest tokens that an indexer of any layer chooses for a query; 0 where no layer has one."""
    counts = [CHOOSE_TOKENS.argument(node.args, "count") for graph in (step, *block_graphs(step).values())
              for node in graph.graph.find_nodes(op="call_function", target=CHOOSE_TOKENS.overload)]
    return min(counts, default=0)
