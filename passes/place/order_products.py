"""Put products of one operand next to each other, so that one launch may compute them."""

from __future__ import annotations

from torch import fx

from forebay.passes.place.shorten_lifetimes import peak_nbytes
from forebay.rewriter.ir.products import linear_arguments


def order_products(gm: fx.GraphModule) -> None:
    """Move plain products of one operand to just after the first of them, unless the peak of live bytes then rises.
    Graphs that call blocks are left alone."""
    nodes = list(gm.graph.nodes)
    if any(node.op == "call_module" for node in nodes):
        return
    places = {node: i for i, node in enumerate(nodes)}
    after: dict[fx.Node, list[fx.Node]] = {}
    firsts: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        linear = linear_arguments(node)
        if linear is None or linear[3:6] != (None, None, ""):
            continue
        first = firsts.setdefault(linear.x, node)
        if first is not node and all(places[operand] < places[first] for operand in node.all_input_nodes):
            after.setdefault(first, []).append(node)
    moved = {node for group in after.values() for node in group}
    order = [n for node in nodes if node not in moved for n in (node, *after.get(node, ()))]
    if order == nodes or peak_nbytes(order) > peak_nbytes(nodes):
        return
    for first, group in after.items():
        for node in reversed(group):
            first.append(node)
