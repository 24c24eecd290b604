"""Fold root-mean-square normalisation into one operator."""

from __future__ import annotations

import torch
from torch import fx

from forebay.kernels.operators import RMS_NORM

aten = torch.ops.aten
CASTS = (aten.to.dtype, aten._to_copy.default)


def fuse_rms_norm(gm: fx.GraphModule) -> None:
    """Replace weight * (x * rsqrt(mean(x^2) + eps)), computed in float32 and rounded back, by `forebay::rms_norm`.

    The result is the same to the rounding of the sum. Fires only where weight [H] scales the last dimension, x and
    weight are of one dtype, and nothing else reads the parts.
    """
    graph, changed = gm.graph, False
    for node in list(graph.nodes):
        found = _match(node)
        if found is None:
            continue
        x, weight, eps = found
        with graph.inserting_before(node):
            fused = graph.call_function(RMS_NORM.overload, (x, weight, eps))
        fused.meta = {**node.meta, "made_by": "fuse_rms_norm"}
        node.replace_all_uses_with(fused)
        changed = True
    if changed:
        graph.eliminate_dead_code()  # it looks at every node twice


def _match(node: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """(x, weight, eps) where `node` is the last multiplication of the pattern."""
    if node.target is not aten.mul.Tensor or not all(isinstance(a, fx.Node) for a in node.args):
        return None
    for weight, normed in (node.args, node.args[::-1]):
        assert isinstance(weight, fx.Node) and isinstance(normed, fx.Node)
        if weight.op != "placeholder" or weight.meta["val"].dim() != 1:
            continue
        scaled = _through_cast(normed)
        if scaled.target is not aten.mul.Tensor or len(scaled.users) != 1 or len(normed.users) != 1:
            continue
        wide, root = scaled.args
        if not (isinstance(wide, fx.Node) and isinstance(root, fx.Node) and root.target is aten.rsqrt.default):
            continue
        eps = _eps_of(root, wide)
        x = _through_cast(wide)
        if eps is None or x.meta["val"].dtype != weight.meta["val"].dtype or x.meta["val"].shape[-1] != \
                weight.meta["val"].shape[0] or normed.meta["val"].dtype != x.meta["val"].dtype:
            continue
        if wide.meta["val"].dtype != torch.float32:
            continue
        return x, weight, eps
    return None


def _through_cast(node: fx.Node) -> fx.Node:
    """Return the operand of a dtype cast, else the node itself."""
    source = node.args[0] if node.target in CASTS else node
    return source if isinstance(source, fx.Node) else node


def _eps_of(root: fx.Node, wide: fx.Node) -> float | None:
    """eps where `root` is rsqrt(mean(wide^2, -1, keepdim) + eps) and nothing else reads the parts."""
    added = root.args[0]
    if not isinstance(added, fx.Node) or added.target not in (aten.add.Tensor, aten.add.Scalar):
        return None
    mean, eps = added.args[:2]
    if not isinstance(mean, fx.Node) or not isinstance(eps, float | int) or mean.target is not aten.mean.dim:
        return None
    squared, dims, *keep = mean.args
    if list(dims) != [-1] or not keep or keep[0] is not True or not isinstance(squared, fx.Node):  # type: ignore[arg-type]
        return None
    if squared.target is not aten.pow.Tensor_Scalar or squared.args != (wide, 2):
        return None
    parts = (root, added, mean, squared)
    return float(eps) if all(len(part.users) == 1 for part in parts) else None
