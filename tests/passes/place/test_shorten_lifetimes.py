"""shorten_lifetimes: order, numerics, and where nothing may move."""

from __future__ import annotations

import copy

import pytest
import torch
from families import captured
from torch import fx
from traced import traced

from forebay.passes.place.shorten_lifetimes import shorten_lifetimes
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.switches import Switches

aten = torch.ops.aten


def targets(gm: fx.GraphModule) -> list[object]:
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


def late_use(x: torch.Tensor) -> torch.Tensor:
    """Two wide values, one of them used only at the end."""
    early = x.repeat(1, 8).exp()
    y = x.repeat(1, 8).cumsum(1).sum(1, keepdim=True)
    return y + early.sum(1, keepdim=True)


def test_a_wide_value_is_made_where_it_is_read() -> None:
    x = torch.randn(3, 4)
    gm = traced(late_use, x)
    expected = gm(x)
    before = targets(gm)
    assert before.index(aten.exp.default) < before.index(aten.cumsum.default)
    shorten_lifetimes(gm)
    gm.graph.lint()
    gm.recompile()
    after = targets(gm)
    assert sorted(map(str, after)) == sorted(map(str, before))
    first_sum = after.index(aten.sum.dim_IntList)
    assert not (after.index(aten.exp.default) < first_sum and after.index(aten.cumsum.default) < first_sum)
    torch.testing.assert_close(gm(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("function", [
    lambda x: (x.exp() * 2).sum(1),  # a chain has one order
    lambda x: x.sum(1).exp() + x.repeat(1, 8).sum(1),  # a small value that waits while a wide one is made
])
def test_an_order_that_gains_nothing_is_left(function) -> None:
    gm = traced(function, torch.randn(3, 4))
    before = str(gm.graph)
    shorten_lifetimes(gm)
    assert str(gm.graph) == before


def test_writes_and_their_readers_keep_their_order() -> None:
    def f(x: torch.Tensor, store: torch.Tensor) -> torch.Tensor:
        before = store.sum(1)
        wide = x.repeat(1, 8).exp()
        store.add_(x.repeat(1, 8).cumsum(1))
        after = store.sum(1)
        return before - after + wide.sum(1)

    x, store = torch.randn(3, 4), torch.randn(3, 32)
    graph = fx.Graph()
    a, b = (graph.placeholder(name) for name in ("x", "store"))
    for node, value in ((a, x), (b, store)):
        node.meta["val"] = value

    def call(op: object, *args: object) -> fx.Node:
        node = graph.call_function(op, args)  # type: ignore[arg-type]
        values = [arg.meta["val"].clone() if isinstance(arg, fx.Node) else arg for arg in args]
        node.meta["val"] = op(*values)  # type: ignore[operator]
        return node

    before = call(aten.sum.dim_IntList, b, [1])
    wide = call(aten.exp.default, call(aten.repeat.default, a, [1, 8]))
    call(aten.add_.Tensor, b, call(aten.cumsum.default, call(aten.repeat.default, a, [1, 8]), 1))
    after = call(aten.sum.dim_IntList, b, [1])
    total = call(aten.sum.dim_IntList, wide, [1])
    graph.output(call(aten.add.Tensor, call(aten.sub.Tensor, before, after), total))
    gm = fx.GraphModule({}, graph)
    expected = f(x, store.clone())
    torch.testing.assert_close(gm(x, store.clone()), expected)
    shorten_lifetimes(gm)
    gm.recompile()
    order = list(graph.nodes)
    assert order.index(wide) > order.index(after), "it has moved behind the write"
    torch.testing.assert_close(gm(x, store.clone()), expected)


@pytest.mark.parametrize("family", ["opt", "qwen3", "gpt_neox"])
def test_queries_wait_until_keys_and_values_are_stored(family: str) -> None:
    block = next(iter(rewrite_captured(captured(family), Switches(skip=("shorten_lifetimes",))).blocks().values()))
    gm = copy.deepcopy(block)
    shorten_lifetimes(gm)
    gm.graph.lint()
    gm.recompile()
    order = [str(t) for t in targets(gm)]
    append = order.index("forebay.kv_append.default")
    assert order.index("forebay.attention.default") > append
    names = [n.name for n in gm.graph.nodes if n.op == "call_function"]
    query = next(n for n in gm.graph.nodes if str(n.target) == "forebay.attention.default").args[0]
    while query.op == "call_function" and len(query.all_input_nodes) and query.users and (
            "linear" not in query.name and "chunk" not in query.name):
        assert names.index(query.name) > names.index("kv_append")
        query = query.all_input_nodes[0]
    sizes: dict[str, int] = {}
    inputs = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        shape = [s if isinstance(s, int) else sizes.setdefault(str(s), (2, 5, 9)[min(len(sizes), 2)])
                 for s in value.shape]
        if value.dtype.is_floating_point:
            inputs.append(torch.randn(shape, dtype=value.dtype) / 4)
        else:
            inputs.append(torch.ones(shape, dtype=value.dtype))
    runs = []
    for module in (gm, block):
        given = [t.clone() for t in inputs]
        runs.append([*torch.utils._pytree.tree_leaves(module(*given)), *given])  # the caches too
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_a_graph_that_calls_blocks_is_left_alone() -> None:
    step = rewrite_captured(captured("opt"), Switches()).step
    before = str(step.graph)
    shorten_lifetimes(step)
    assert str(step.graph) == before
