"""Weights that ranks gather before they are read: which these are, and the memory that they share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from forebay.rewriter.ir import ops
from forebay.rewriter.ir.alignment import aligned
from forebay.rewriter.ir.graph import storage_of, values_of, weight_name

GATHER_BUFFER = "gathered"  # the buffer that they take turns in


def gathers_weight(node: fx.Node) -> bool:
    """Return whether a node gathers a weight as a rank has it, in memory or fetched: it waits for nothing that is
    computed."""
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
