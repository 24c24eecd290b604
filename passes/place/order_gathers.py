"""Weights that ranks gather before they are read: which these are, what memory they share, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from forebay.rewriter.ir import ops
from forebay.rewriter.ir.alignment import aligned
from forebay.rewriter.ir.graph import storage_of, values_of, weight_name
from forebay.rewriter.ir.plan import Plan

RING = "gathered"  # the buffer that they take turns in


def order_gathers(gm: fx.GraphModule, plan: Plan) -> None:
    """Put every gather of a weight, where the plan has memory for those that come early, before its first reader, with
    what fetches the rank's part: they take turns in that memory in the order in which they are read."""
    if not plan.schedule.block.gather_buffers:
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


def gathers_weight(node: fx.Node) -> bool:
    """Whether a node gathers a weight as a rank has it, in memory or fetched: it waits for nothing that is computed."""
    if node.target is not torch.ops._c10d_functional.all_gather_into_tensor.default:
        return False
    base = storage_of(node.args[0])[0]  # type: ignore[arg-type]
    return base.target is ops.fetch or weight_name(base) is not None


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """The operators that read a value, or a view of it."""
    for user in node.users:
        if user.op == "call_function" and user.meta.get("alias_of") is not None:
            yield from readers(user)
        else:
            yield user


def _views(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if user.op == "call_function" and user.meta.get("alias_of") is not None:
            yield user
            yield from _views(user)


def last_reader(node: fx.Node) -> fx.Node:
    """The last operator that reads a value."""
    found = set(readers(node))
    return next(n for n in reversed(node.graph.nodes) if n in found)


def ring_nbytes(nodes: Sequence[fx.Node], buffers: int) -> int:
    """Bytes for so many times the most that is read at once of weights that a flat graph gathers, and for what is left
    at the end where the next one does not fit there; 0 where it gathers none."""
    position = {node: i for i, node in enumerate(nodes)}
    changes: dict[int, int] = {}
    most = largest = live = 0
    for node in filter(gathers_weight, nodes):
        nbytes = aligned(values_of(node)[0].untyped_storage().nbytes())
        read = [position[n] for n in readers(node)]
        for at, change in ((min(read), nbytes), (max(read) + 1, -nbytes)):
            changes[at] = changes.get(at, 0) + change
        largest = max(largest, nbytes)
    for at in sorted(changes):
        live += changes[at]
        most = max(most, live)
    return buffers * most + largest
