"""Operators that tracing took apart, put together again as passes and kernels know them."""

from __future__ import annotations

import torch
from torch import fx

from forebay.rewriter.ir.graph import weight_name

aten = torch.ops.aten
TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)


def recover_linear(gm: fx.GraphModule) -> None:
    """Write products with a transposed weight as `aten.linear`, whose weight can stream in row tiles."""
    for node in list(gm.graph.nodes):
        if node.target in (aten.mm.default, aten.matmul.default):
            bias, x, turned = None, node.args[0], node.args[1]
        elif node.target is aten.addmm.default and not node.kwargs and node.args[0].meta["val"].dim() == 1:
            bias, x, turned = node.args
        else:
            continue
        weight = _transposed_weight(turned)
        if weight is None or (bias is not None and bias.meta["val"].shape[0] != node.meta["val"].shape[-1]):
            continue
        node.target, node.args = aten.linear.default, (x, weight) if bias is None else (x, weight, bias)
    gm.graph.eliminate_dead_code()


def recover_batch_norm(gm: fx.GraphModule) -> None:
    """Drop the empty statistics that batch norm returns beside its result: their shape differs between devices."""
    for node in gm.graph.find_nodes(op="call_function", target=aten._native_batch_norm_legit_no_training.default):
        if any(user.args[1] != 0 for user in node.users):
            continue
        x, weight, bias, mean, variance, momentum, eps = node.args
        with gm.graph.inserting_before(node):
            args = (x, weight, bias, mean, variance, False, momentum, eps, False)
            whole = gm.graph.call_function(aten.batch_norm.default, args)
        whole.meta = {**node.meta, "val": node.meta["val"][0]}
        for user in list(node.users):
            user.replace_all_uses_with(whole)
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)


def _transposed_weight(node: fx.Node) -> fx.Node | None:
    """The matrix weight that `node` is the transpose of, if it is."""
    if node.target not in TRANSPOSES:
        return None
    weight = node.args[0]
    assert isinstance(weight, fx.Node)
    whole = weight.meta["val"]
    turned = node.meta["val"]
    if weight_name(weight) is None or whole.dim() != 2 or turned.stride() != whole.stride()[::-1]:
        return None
    return weight
