"""Make layer norm over the last dimension one operator that writes into given memory."""

from __future__ import annotations

import torch
from torch import fx

from forebay.kernels.operators import LAYER_NORM

aten = torch.ops.aten


def fuse_layer_norm(gm: fx.GraphModule) -> None:
    """Replace torch's layer norm, its mean, variance, scale and shift, by `forebay::layer_norm`, which equals it.

    Fires only where the last dimension alone is normalised, and the kernels take x, weight and bias: of one dtype, and
    rows of at most 16384 numbers.
    """
    changed = False
    for node in list(gm.graph.nodes):
        if node.target is not aten.layer_norm.default:
            continue
        x, shape, weight, bias, eps = _arguments(node)
        if len(shape) != 1 or not LAYER_NORM.takes(*(None if t is None else t.meta["val"] for t in (x, weight, bias))):
            continue
        with gm.graph.inserting_before(node):
            fused = gm.graph.call_function(LAYER_NORM.overload, (x, weight, bias, eps))
        fused.meta = {**node.meta, "made_by": "fuse_layer_norm"}
        node.replace_all_uses_with(fused)
        gm.graph.erase_node(node)
        changed = True
    if changed:
        gm.graph.lint()


def _arguments(node: fx.Node) -> tuple[fx.Node, list[object], fx.Node | None, fx.Node | None, float]:
    """(x, normalised sizes, weight, bias, eps) of a call of aten.layer_norm."""
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    given = {"weight": None, "bias": None, "eps": 1e-5, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    return given["input"], list(given["normalized_shape"]), given["weight"], given["bias"], float(given["eps"])  # type: ignore
