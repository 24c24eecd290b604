"""A layer's matmuls, live values and attention stage, read off its graph, for one token."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from forebay.kernels import operators
from forebay.kernels.operator import Tensors
from forebay.kernels.products.experts.operator import arguments_of
from forebay.rewriter.ir.graph import storage_of, values_of, weight_name
from forebay.rewriter.ir.products import experts_among, reads_table

aten = torch.ops.aten
# How captured graphs multiply by a weight, and show it or a part of it.
PRODUCTS = frozenset((aten.linear.default, aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
                      aten.matmul.default, aten.einsum.default, aten._grouped_mm.default))
VIEWS = frozenset((aten.transpose.int, aten.t.default, aten.permute.default, aten.view.default, aten.reshape.default,
                   aten.slice.Tensor))
RECURRENT = {operator.overload: operator for operator in (
    operators.LINEAR_RECURRENCE, operators.SELECTIVE_SCAN, operators.WKV, operators.SHORT_CONV)}


def recurrences(nodes: list[fx.Node]) -> list[fx.Node]:
    """The nodes of a layer that update its recurrent states; without any, its short convolutions."""
    return [n for n in nodes if n.target in RECURRENT and n.target is not operators.SHORT_CONV.overload] or [
        n for n in nodes if n.target is operators.SHORT_CONV.overload]


def state_flops(nodes: list[fx.Node]) -> int:
    """Operations per token of a layer's recurrences and short convolutions."""
    def of_one(value: Any) -> Any:
        found = values_of(value) if isinstance(value, fx.Node) else ()
        return torch.empty(sizes_of_one(found[0].shape), dtype=found[0].dtype, device="meta") if found else value

    return sum(round(RECURRENT[n.target].cost(Tensors(tuple(map(of_one, n.args)), {}, (of_one(n),))).flops)
               for n in nodes if n.target in RECURRENT)


def attention_stage(nodes: list[fx.Node], attentions: list[fx.Node], others: list[fx.Node]) -> set[fx.Node]:
    """Nodes that attention needs, and those that follow it up to the first product that is not by heads. A second
    attention of a layer reads the first's results through one node, and needs the nodes after that. The same of
    `others`, which stand beside attention or in its place."""
    found = set[fx.Node]().union(*(attention_stage(nodes, [other], []) for other in others))
    begin = 0
    for attention in attentions:
        end = nodes.index(attention)
        appended = [n for n in nodes[begin:end] if n.target is operators.KV_APPEND.overload]
        before, stack = {attention, *appended}, [attention, *appended]
        while stack:
            for source in stack.pop().all_input_nodes:
                if source not in before:
                    before.add(source)
                    stack.append(source)
        cut = _last_cut(nodes[begin:end], before, {attention, *appended}) if begin else None
        found |= before - set(nodes[: nodes.index(cut) + 1] if cut is not None else ())
        after, projected = {attention}, False
        for node in nodes[end + 1:]:
            if any(s in after for s in node.all_input_nodes) and not projected:
                after.add(node)
                projected = product(node)[0] is not None and node.target is not aten.bmm.default
        found |= after
        begin = end
    return found


def _last_cut(nodes: list[fx.Node], needed: set[fx.Node], ends: set[fx.Node]) -> fx.Node | None:
    """The last node whose value alone, of those before it, the `needed` ones after it read; `ends` are read last."""
    cut, live = None, set[fx.Node]()
    for i, node in enumerate(nodes):
        if node in needed:
            later = needed.intersection(nodes[i + 1:]) | ends
            live = {each for each in {*live, node} if each in ends or later.intersection(each.users)}
            cut = node if live == {node} else cut
    return cut


def product(node: fx.Node) -> tuple[fx.Node | None, int]:
    """(the weight, operations per token) of a product with a weight, (None, 0) of any other node."""
    if node.op != "call_function" or not values_of(node):
        return None, 0
    if node.target is operators.EXPERTS.overload:
        given = arguments_of(node.args)
        units = 2 * given.inner if given.form.gated else given.inner
        chosen = used_share(given.table, node) * values_of(given.table)[0].shape[0]
        return given.table, round(2 * chosen * (units + given.inner) * sizes_of_one(values_of(given.x)[0].shape)[-1])
    weight = next((a for a in node.all_input_nodes if _is_matrix(a)), None)
    if weight is None or node.target not in PRODUCTS:
        return None, 0
    out, shape = (sizes_of_one(values_of(each)[0].shape) for each in (node, weight))
    return weight, 2 * math.prod(out) * (math.prod(shape[-2:]) // out[-1])


def used_share(weight: fx.Node, user: fx.Node) -> float:
    """The share of a weight that `user` takes for a token: of a table of experts those that its router picks."""
    if not reads_table(user, weight):
        return 1.0
    count = values_of(weight)[0].shape[0]
    picks = sizes_of_one(values_of(arguments_of(user.args).index)[0].shape)[-1]
    return min(1.0, float(picks / experts_among(weight).get("among", count)))


def _is_matrix(node: fx.Node) -> bool:
    base, _ = storage_of(node)
    while base.target in VIEWS:
        base = base.all_input_nodes[0]
    return weight_name(base) is not None and values_of(base)[0].dim() > 1


def sizes_of_one(shape: Any) -> list[int]:
    """A shape for one token: every symbolic size taken as 1."""
    return [int(s.node.expr.subs(dict.fromkeys(s.node.expr.free_symbols, 1))) if isinstance(s, torch.SymInt) else int(s)
            for s in shape]


def live_elements(nodes: list[fx.Node]) -> int:
    """Peak of live elements of one token over a block, caches and weights aside."""
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        for source in node.all_input_nodes:
            last[storage_of(source)[0]] = i
    live: dict[fx.Node, int] = {}
    peak = 0
    for i, node in enumerate(nodes):
        base = storage_of(node)[0]
        is_value = node.op == "call_function" and base is node and values_of(node)
        if is_value or (node.op == "placeholder" and node.name == "hidden"):
            live[node] = sum(math.prod(sizes_of_one(v.shape)) for v in values_of(node)
                             if any(isinstance(size, torch.SymInt) for size in v.shape))
        peak = max(peak, sum(live.values()))
        for dead in [n for n in live if last.get(n, i) <= i]:
            del live[dead]
    return peak
