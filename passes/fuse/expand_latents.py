"""Attend to keys and values made of latents, instead of to the latents."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from forebay.kernels.operators import ATTENTION, ATTENTION_Q, EXPANDED_ATTENTION, of_target

aten = torch.ops.aten
SHAPES = (aten.view.default, aten.reshape.default, aten.permute.default, aten.slice.Tensor, aten.transpose.int)


class _Absorbed(NamedTuple):
    """Attention over latent rows: queries as they are made, the matrix by heads, rows of each head that make keys, and
    the values that come out."""

    query: fx.Node
    up: fx.Node
    plain: int
    values: fx.Node


def expand_latents(gm: fx.GraphModule) -> None:
    """Make every attention over latent rows in `gm`, a graph of steps over several tokens, the operator that expands
    keys and values. The products that absorb the matrix into queries and results go. Other attention stays."""
    graph, changed = gm.graph, False
    for node in [node for node in graph.nodes if of_target(node.target) in (ATTENTION, ATTENTION_Q)]:
        found = _match(node)
        if found is None:
            continue
        with graph.inserting_before(node):
            _, *shared = node.args[:7]
            made = graph.call_function(EXPANDED_ATTENTION.overload, (
                found.query, *shared, found.up, found.plain, *node.args[7:]))
        made.meta = {**node.meta, "val": found.values.meta["val"].contiguous(), "made_by": expand_latents.__name__}
        found.values.replace_all_uses_with(made)
        changed = True
    if changed:
        graph.eliminate_dead_code()


def _match(node: fx.Node) -> _Absorbed | None:
    """Match the nodes that capture puts around latent attention (`Latent` in `rewriter/capture/latent.py`)."""
    query, rows, other = node.args[:3]
    more = 0 if of_target(node.target) is ATTENTION else 2  # bits and group of packed rows
    if rows is not other or len(node.args) > 7 + more or not isinstance(query, fx.Node) or (
            query.target is not aten.cat.default or len(node.users) != 1):
        return None
    parts: Any = query.args[0]
    if len(parts) != 2 or parts[1].target is not aten.slice.Tensor:
        return None
    whole, _, plain = parts[1].args[:3]
    absorbed = _before(parts[0])
    if absorbed.target is not aten.bmm.default or _before(absorbed.args[0]) is not _before(whole):
        return None
    half: Any = absorbed.args[1]
    summed = _after(node)
    if summed is None or summed.target is not aten.bmm.default:
        return None
    rest: Any = summed.args[1].args[0]  # type: ignore[union-attr]
    if any(each.target is not aten.slice.Tensor for each in (half, rest)) or (
            (*half.args[1:4], *rest.args[1:3]) != (1, 0, plain, 1, plain)):
        return None
    values = next(iter(summed.users))
    while values.target in SHAPES and len(values.users) == 1 and values.target is not aten.permute.default:
        values = next(iter(values.users))
    if values.target is not aten.permute.default or _before(summed.args[1]) is not _before(half):
        return None
    return _Absorbed(whole, half.args[0], plain, values)


def _before(node: Any) -> fx.Node:
    """The node whose values this one shows in another shape."""
    while node.target in SHAPES:
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _after(node: fx.Node) -> fx.Node | None:
    """The one node that computes with a value, which others show in other shapes."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        if node.target not in SHAPES:
            return node
    return None
