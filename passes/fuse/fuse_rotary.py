"""Fold rotary position embedding into one operator."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from forebay.kernels.operators import ROTARY

aten = torch.ops.aten


def fuse_rotary(gm: fx.GraphModule) -> None:
    """Replace x * cos + rotate_half(x) * sin by `forebay::rotary`, which rounds as the parts do.

    Fires only where cos and sin [B, S, R] are spread over heads (dimension 1) of x [B, H, S, R], the halves are equal,
    and nothing else reads the parts.
    """
    graph, changed = gm.graph, False
    for node in list(graph.nodes):
        found = _match(node)
        if found is None:
            continue
        with graph.inserting_before(node):
            fused = graph.call_function(ROTARY.overload, found)
        fused.meta = {**node.meta, "made_by": "fuse_rotary"}
        node.replace_all_uses_with(fused)
        changed = True
    if changed:
        graph.eliminate_dead_code()  # it looks at every node twice


def _match(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(x, cos, sin) where `node` is the sum of the pattern."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    straight, turned = node.args
    if not all(isinstance(m, fx.Node) and m.target is aten.mul.Tensor and len(m.users) == 1 for m in node.args):
        return None
    x, cos = _factors(straight)
    rotated, sin = _factors(turned)
    if x is None or cos is None or rotated is None or sin is None or x.meta["val"].dim() != 4:
        return None
    if not _is_rotation(rotated, x) or {v.meta["val"].dtype for v in (cos, sin)} != {x.meta["val"].dtype}:
        return None
    if any(v.meta["val"].dim() != 3 or v.meta["val"].shape[-1] != x.meta["val"].shape[-1] for v in (cos, sin)):
        return None
    return x, cos, sin


def _factors(product: object) -> tuple[fx.Node | None, fx.Node | None]:
    """x and table of x * table.unsqueeze(1)."""
    assert isinstance(product, fx.Node)
    x, table = product.args
    if not isinstance(x, fx.Node) or not isinstance(table, fx.Node) or table.target is not aten.unsqueeze.default:
        return None, None
    source, dim = table.args
    return (x, source) if dim == 1 and isinstance(source, fx.Node) else (None, None)


def _is_rotation(node: fx.Node, x: fx.Node) -> bool:
    """Return whether `node` is cat(-x[..., R/2:], x[..., :R/2])."""
    if node.target is not aten.cat.default or len(node.args) != 2 or node.args[1] != -1 or len(node.users) != 1:
        return False
    parts: Any = node.args[0]
    if len(parts) != 2 or parts[0].target is not aten.neg.default:
        return False
    width = x.meta["val"].shape[-1]
    upper, lower = parts[0].args[0], parts[1]
    return width % 2 == 0 and _is_slice(upper, x, width // 2, width) and _is_slice(lower, x, 0, width // 2)


def _is_slice(node: object, x: fx.Node, start: int, stop: int) -> bool:
    if not isinstance(node, fx.Node) or node.target is not aten.slice.Tensor or len(node.args) != 4:
        return False
    source, dim, begin, end = cast(tuple[Any, ...], node.args)
    width = x.meta["val"].shape[-1]
    return source is x and dim in (3, -1) and begin == start and bool(min(end, width) == stop)
