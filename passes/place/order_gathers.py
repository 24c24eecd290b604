"""Weights that ranks gather before they are read: which these are, what memory they share, and in which order."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from forebay.rewriter.ir import ops
from forebay.rewriter.ir.gathers import gathers_weight, readers
from forebay.rewriter.ir.plan import Plan


def order_gathers(gm: fx.GraphModule, plan: Plan) -> None:
    """Put every gather of a weight, where the plan has memory for those that come early, before its first reader, with
    what fetches the rank's part: they take turns in that memory in the order in which they are read."""
    if not plan.schedule.batching.gathering.buffers:
        return
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    for node in [n for n in order if gathers_weight(n)]:
        part = node.args[0]
        assert isinstance(part, fx.Node)
        given_back = [n for n in part.users if n.target is ops.release]
        first = min(readers(node), key=order.__getitem__)
        for moved in (*([part] if part.target is ops.fetch else []), node, *given_back):
            first.prepend(moved)
        for view in sorted(_views(node), key=order.__getitem__):
            first.prepend(view)


def _views(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if user.op == "call_function" and user.meta.get("alias_of") is not None:
            yield user
            yield from _views(user)
