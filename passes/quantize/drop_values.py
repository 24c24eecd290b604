"""Read the values of few tokens only: those to which a step's query gives the largest weights."""

from __future__ import annotations

from torch import fx

from forebay.kernels.operators import of_target


def drop_values(gm: fx.GraphModule, share: float) -> None:
    """Make every attention over a cache in `gm`, a graph of steps over one token, the operator that multiplies the
    values of a `share` of the tokens (FlexGen, section 5). A graph without attention keeps its nodes."""
    for node in gm.graph.nodes:
        operator = of_target(node.target)
        if operator is None or operator.sparse is None or (
                "sinks" in operator.arguments and operator.argument(node.args, "sinks") is not None):
            continue
        place = operator.sparse.arguments.index("kept")
        node.target = operator.sparse.overload
        node.args = (*node.args[:place], share, *node.args[place:])
        node.meta["made_by"] = drop_values.__name__
