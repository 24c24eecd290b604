"""allocate_buffers gives every value memory of its exact size for exactly as long as someone reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import Tiny, aten, chain, flat_graph, placements, plan_for, run_program
from torch import fx

from forebay.passes.allocate_buffers import ALIGNMENT, allocate_buffers, plan_activations
from forebay.passes.hoist_prefetch import hoist_prefetch
from forebay.passes.insert_transfers import insert_transfers
from forebay.passes.lower import lower
from forebay.rewriter.graph import META, Layout, storage_of, values_of
from forebay.rewriter.plan import Plan, PlanError
from forebay.rewriter.verify import verify_program


def graph_of(build: object, **inputs: torch.Tensor) -> fx.GraphModule:
    return flat_graph(build, inputs, {})  # type: ignore[arg-type]


def assert_no_overlap(layout: Layout) -> None:
    buffers = list(layout.buffers.values())
    for i, a in enumerate(buffers):
        assert a.offset >= 0
        for b in buffers[i + 1 :]:
            together = a.first <= b.last and b.first <= a.last
            apart = a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
            assert apart or not together, f"{a} and {b}"


def assert_lifetimes_cover_every_use(gm: fx.GraphModule, layout: Layout) -> None:
    """From the graph alone: who makes a storage, and who reads it, itself or through a view."""
    for i, node in enumerate(gm.graph.nodes):
        for read in (node, *node.all_input_nodes):
            key = storage_of(read)
            if values_of(read) and key in layout.home:
                b = layout.buffers[layout.home[key]]
                assert b.first <= i <= b.last, f"{node} uses {b.name} outside of [{b.first}, {b.last}]"


def test_chain_takes_two_values_not_all(tmp_path: Path) -> None:
    model = chain(tmp_path, layers=6)
    gm = model.graph()
    layout = plan_activations(gm)
    assert_no_overlap(layout)
    assert_lifetimes_cover_every_use(gm, layout)
    one = 2 * 32 * 4
    assert layout.height <= 3 * one, "input, and two activations that alternate"
    assert layout.height >= layout.lower_bound
    assert {b.nbytes for b in layout.buffers.values()} == {one}


def test_without_reuse_every_value_keeps_its_place(tmp_path: Path) -> None:
    gm = chain(tmp_path, layers=4).graph()
    layout = plan_activations(gm, reuse=False)
    assert len(layout.buffers) == 1 + 8
    assert layout.height == 9 * 256
    assert len({b.offset for b in layout.buffers.values()}) == 9
    assert_lifetimes_cover_every_use(gm, layout)
    ended = [name for names in layout.ends.values() for name in names]
    assert sorted(ended) == sorted(name for name, b in layout.buffers.items() if b.kind == "activation")


def test_sizes_are_those_of_the_storage_not_of_the_view() -> None:
    """A column slice, a transposed copy, a broadcast, and elements of 1, 2 and 8 bytes."""

    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        x = graph.call_function(aten.mul.Tensor, (nodes["x"], 2.0))  # [6, 10]
        turned = graph.call_function(aten.t.default, (x,))
        doubled = graph.call_function(aten.add.Tensor, (turned, turned))  # [10, 6], column-major: 240 bytes
        part = graph.call_function(aten.slice.Tensor, (doubled, 1, 2, 5))  # a view: 3 columns of 6
        half = graph.call_function(aten._to_copy.default, (part,), {"dtype": torch.bfloat16})
        mask = graph.call_function(aten.gt.Scalar, (part, 0.0))
        index = graph.call_function(aten.argmax.default, (part,))
        return (half, mask, index)

    gm = graph_of(build, x=torch.randn(6, 10))
    layout = plan_activations(gm)
    sizes = {str(node.target): layout.buffers[name].nbytes for (node, _), name in layout.home.items()}
    assert sizes["aten.mul.Tensor"] == sizes["aten.add.Tensor"] == 6 * 10 * 4
    assert sizes["aten._to_copy.default"] == 10 * 3 * 2
    assert sizes["aten.gt.Scalar"] == 10 * 3
    assert sizes["aten.argmax.default"] == 8
    assert not any("slice" in target or "t.default" in target for target in sizes), "views take no memory"
    assert_no_overlap(layout)
    assert_lifetimes_cover_every_use(gm, layout)
    slice_node = next(n for n in gm.graph.nodes if n.target is aten.slice.Tensor)
    read = layout.buffers[layout.home[storage_of(slice_node)]]
    assert list(gm.graph.nodes)[read.last].target is aten.argmax.default, "alive while its view is read"


def test_several_results_are_several_buffers() -> None:
    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        import operator

        top = graph.call_function(aten.topk.default, (nodes["x"], 3))
        values, index = (graph.call_function(operator.getitem, (top, i)) for i in range(2))
        x = graph.call_function(aten.exp.default, (values,))
        return (graph.call_function(aten.gather.default, (x, 1, index)),)

    gm = graph_of(build, x=torch.randn(4, 9))
    layout = plan_activations(gm)
    sizes = sorted(b.nbytes for b in layout.buffers.values())
    assert sizes == [4 * 3 * 4, 4 * 3 * 4, 4 * 3 * 8, 4 * 9 * 4]  # exp in place of values: gather, values, index, x
    assert_no_overlap(layout)
    assert_lifetimes_cover_every_use(gm, layout)


def homes(gm: fx.GraphModule) -> dict[str, str]:
    return {node.name: name for (node, _), name in plan_activations(gm).home.items()}


def test_pointwise_result_takes_the_place_of_an_operand_that_dies() -> None:
    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        a = graph.call_function(aten.mul.Tensor, (nodes["x"], nodes["x"]))
        b = graph.call_function(aten.silu.default, (a,))
        return (graph.call_function(aten.add.Tensor, (b, nodes["x"])),)

    found = homes(graph_of(build, x=torch.randn(4, 4)))
    assert found["silu_default"] == found["mul_tensor"] == found["add_tensor"]
    assert found["mul_tensor"] != found["x"], "the caller's input is never overwritten"


@pytest.mark.parametrize("why", ["read later", "broadcast", "two views", "other dtype", "not pointwise", "sliced"])
def test_no_place_is_taken_while_it_may_be_read(why: str) -> None:
    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        def call(op: object, *args: object, **kwargs: object) -> fx.Node:
            return graph.call_function(op, args, kwargs)  # type: ignore[arg-type]

        a = call(aten.mul.Tensor, nodes["x"], 2.0)
        if why == "read later":
            b = call(aten.exp.default, a)
            return (call(aten.sub.Tensor, b, a),)
        if why == "broadcast":
            row = call(aten.mul.Tensor, nodes["row"], 2.0)
            return (call(aten.add.Tensor, row, nodes["x"]),)
        if why == "two views":
            return (call(aten.add.Tensor, a, call(aten.t.default, a)),)
        if why == "other dtype":
            return (call(aten.gt.Tensor, a, nodes["x"]),)
        if why == "not pointwise":
            return (call(aten.cumsum.default, a, 0),)
        return (call(aten.exp.default, call(aten.slice.Tensor, a, 0, 1, 3)),)

    gm = graph_of(build, x=torch.randn(4, 4), row=torch.randn(4))
    layout = plan_activations(gm)
    names = [layout.home[node, 0] for node in gm.graph.nodes if (node, 0) in layout.home]
    if why == "read later":  # the subtraction may then take the place of either
        exp = next(n for n in gm.graph.nodes if n.target is aten.exp.default)
        mul = next(n for n in gm.graph.nodes if n.target is aten.mul.Tensor)
        assert layout.home[exp, 0] != layout.home[mul, 0]
    else:
        assert len(set(names)) == len(names)
    assert_no_overlap(layout)
    assert_lifetimes_cover_every_use(gm, layout)


def streamed(model: Tiny, **options: object) -> tuple[fx.GraphModule, Plan]:
    plan = plan_for(placements(model, {n: 0 for n in model.weights if n[0] == "w"}), **options)  # type: ignore[arg-type]
    gm = model.graph()
    insert_transfers(gm, plan)
    hoist_prefetch(gm, plan)
    return gm, plan


@pytest.mark.parametrize("reuse", [True, False])
def test_activations_stand_at_the_top_of_the_arena_and_compute_the_same(tmp_path: Path, reuse: bool) -> None:
    model = chain(tmp_path, layers=3)
    gm, plan = streamed(model, reuse=reuse)
    allocate_buffers(gm, plan)
    layout = gm.meta[META]
    top = plan.arenas["device"]
    floor = max(b.offset + b.nbytes for b in plan.buffers)
    assert min(b.offset for b in layout.buffers.values()) >= floor
    assert max(b.offset + b.nbytes for b in layout.buffers.values()) <= top
    assert all(b.offset % ALIGNMENT == 0 for b in layout.buffers.values())
    assert not any("fetch" in name for name in layout.buffers), "a fetched tile lives in its slot"
    program = lower(gm, plan, model.files, lambda node: 0)
    verify_program(program)
    got = run_program(program, plan, model, poison=True)[0]
    torch.testing.assert_close(got, model.expected()[0], rtol=1e-5, atol=1e-5)


def test_constants_and_weights_take_no_activation_memory(tmp_path: Path) -> None:
    model = chain(tmp_path, layers=2)
    layout = plan_activations(model.graph())
    assert not set(layout.buffers) & set(model.weights)


def test_arena_that_is_too_small_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    model = chain(tmp_path, layers=2)
    gm, plan = streamed(model)
    floor = max(b.offset + b.nbytes for b in plan.buffers)
    need = plan_activations(gm).height
    with pytest.raises(PlanError, match=rf"activations need {need} bytes.*{need - 1} left"):
        allocate_buffers(gm, replace(plan, arenas={"device": floor + need - 1}))
    allocate_buffers(gm, replace(plan, arenas={"device": floor + need + ALIGNMENT}))
