"""Read weights that are stored as packed rows: unpack them in the graph, and fold that into what consumes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from forebay.kernels.formats.packing import Packing
from forebay.kernels.formats.row_sizes import product_refusal
from forebay.kernels.operators import DEQUANTIZE_ROWS, EXPERTS
from forebay.rewriter.ir.graph import META, RowFormat, weight_name
from forebay.rewriter.ir.products import Linear, fold, is_plain_bias, linear_arguments

aten = torch.ops.aten
FLATTENING = (aten.view.default, aten.reshape.default, aten.flatten.using_ints)


def quantize_weights(gm: fx.GraphModule, formats: Mapping[str, RowFormat]) -> None:
    """Turn each weight named in `formats` into its packed rows uint8 [N, R], with a `forebay::dequantize_rows` between
    them and its readers, of which experts read packed entries themselves; afterwards the graph computes with what the
    rows stand for.

    Blocks that a step graph calls read weights of their own and are not touched.
    """
    for node in gm.graph.find_nodes(op="placeholder"):
        name = weight_name(node)
        stored = None if name is None else formats.get(name)
        if name is None or stored is None:
            continue
        readers = [user for user in node.users if user.op != "call_module"]
        original = node.meta["val"]
        rows = torch.empty((stored.out_features, stored.row_nbytes), dtype=torch.uint8, device="meta")
        node.meta = {**node.meta, "val": rows, META: replace(node.meta[META], format=stored.name)}
        if stored.down is not None:
            for user in readers:
                _read_packed_experts(user, stored, stored.down)
            continue
        if not readers:
            continue
        with gm.graph.inserting_before(min(readers, key=list(gm.graph.nodes).index)):
            value = gm.graph.call_function(DEQUANTIZE_ROWS.overload, (
                node, stored.in_features, stored.bits, stored.group_size, stored.scale_dtype, stored.dtype,
                stored.transposed, stored.symmetric, stored.codebook))
        value.meta = {"val": original, "layer": readers[0].meta.get("layer", -1), "made_by": "quantize_weights"}
        if original.dim() == 3:
            _read_stacked(gm.graph, node, value)
            continue
        for user in readers:
            user.replace_input_with(node, value)


def _read_stacked(graph: fx.Graph, node: fx.Node, value: fx.Node) -> None:
    """Let readers of a matrix of each expert [E, N, K], which is `node`, have the values of its rows, [E * N, K]: those
    that flatten it as they are, those that take an expert's of its own rows, others with the dimension of experts."""
    stacked = value.meta["val"]
    value.meta["val"] = rows = stacked.flatten(0, 1)
    readers = [user for user in node.users if user is not value and user.op != "call_module"]
    for user in readers:
        if user.target in FLATTENING and user.meta["val"].shape == rows.shape:
            user.replace_all_uses_with(value)
            graph.erase_node(user)
            continue
        if user.target is aten.select.int and user.args[1] == 0:
            _read_expert(graph, user, value)
            continue
        with graph.inserting_before(user):
            view = graph.call_function(aten.view.default, (value, list(stacked.shape)))
        view.meta = {**value.meta, "val": stacked}
        user.replace_input_with(node, view)


def _read_expert(graph: fx.Graph, user: fx.Node, value: fx.Node) -> None:
    """Replace the choice of an expert's matrix [N, K] by the values of its rows."""
    (rows, *how), count, expert = value.args, user.meta["val"].shape[0], user.args[2]
    with graph.inserting_before(user):
        own = graph.call_function(aten.slice.Tensor, (rows, 0, expert * count, (expert + 1) * count))  # type: ignore[operator]
        found = graph.call_function(DEQUANTIZE_ROWS.overload, (own, *how))
    own.meta = {**value.meta, "val": rows.meta["val"][:count]}  # type: ignore[union-attr]
    found.meta = {**value.meta, "val": user.meta["val"]}
    user.replace_all_uses_with(found)
    graph.erase_node(user)


def _read_packed_experts(user: fx.Node, up: RowFormat, down: RowFormat) -> None:
    """Let experts read a table of packed entries, whose rows are outputs whichever way the model has its matrices."""
    form = list(user.args[: EXPERTS.arguments.index("bits")])
    for name in ("transposed", "down_transposed"):
        form[EXPERTS.arguments.index(name)] = False
    how = ((each.bits, each.group_size, each.scale_dtype, each.symmetric, each.codebook) for each in (up, down))
    user.args = (*form, *(value for each in how for value in each))


def fuse_dequantize(gm: fx.GraphModule) -> None:
    """Fold `forebay::dequantize_rows` into the products and lookups that alone consume it: a product reads the packed
    rows itself, a lookup unpacks the rows it names and no others."""
    for node in gm.graph.find_nodes(op="call_function", target=DEQUANTIZE_ROWS.overload):
        for user in list(node.users):
            if user.target is aten.embedding.default and user.args[0] is node and not node.args[6]:
                _unpack_after_lookup(gm.graph, node, user)
            else:
                _fold_into_product(gm.graph, node, user)
        if not node.users:
            gm.graph.erase_node(node)


def _fold_into_product(graph: fx.Graph, node: fx.Node, user: fx.Node) -> None:
    rows, in_features, bits, group_size, scale_dtype, _, transposed, *symmetric = node.args
    found = linear_arguments(user)
    if found is None and transposed:
        found = _conv1d(user)
    elif found is not None and transposed:
        return  # x W^T of a weight whose rows are those of W^T
    if found is None or found.weight is not node or node in (found.x, found.bias, found.multiplier, found.residual):
        return
    if found.bias is not None and not is_plain_bias(found.bias, user.meta["val"].shape[-1]):
        return
    if found.x.meta["val"].dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return
    if product_refusal(in_features, group_size):  # type: ignore[arg-type]
        return
    packing = Packing(bits, in_features, group_size, scale_dtype, *symmetric)  # type: ignore[arg-type]
    fold(graph, user, found._replace(weight=rows, packing=packing), "fuse_dequantize")  # type: ignore[arg-type]


def _conv1d(user: fx.Node) -> Linear | None:
    """bias + x W, as GPT-2 writes products."""
    if user.target is not aten.addmm.default or user.kwargs:
        return None
    bias, x, weight = user.args
    plain = isinstance(bias, fx.Node) and is_plain_bias(bias, user.meta["val"].shape[-1])
    return Linear(x, weight, bias) if plain else None


def _unpack_after_lookup(graph: fx.Graph, node: fx.Node, user: fx.Node) -> None:
    rows, *how = node.args
    index, width = user.args[1], rows.meta["val"].shape[1]  # type: ignore[union-attr]
    with graph.inserting_before(user):
        found = graph.call_function(aten.embedding.default, (rows, index))
        value = graph.call_function(DEQUANTIZE_ROWS.overload, (found, *how))
    shape = index.meta["val"].shape  # type: ignore[union-attr]
    found.meta = {**user.meta, "val": index.meta["val"].new_empty((*shape, width), dtype=torch.uint8),  # type: ignore[union-attr]
                  "made_by": "fuse_dequantize"}
    value.meta = {**user.meta, "made_by": "fuse_dequantize"}
    user.replace_all_uses_with(value)
    graph.erase_node(user)
