"""select_gemm stamps matrix products with the implementation that the plan names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from tiny import Tiny, aten, chain, placements, plan_for, planned, run_graph, run_program, tiny
from torch import fx

from forebay.passes.place.insert_transfers import insert_transfers
from forebay.passes.place.select_gemm import product_shape, select_gemm
from forebay.rewriter.ir import ops
from forebay.rewriter.ir.graph import META, Gemm
from forebay.rewriter.ir.plan import Budget, GemmChoice, Plan
from forebay.rewriter.ir.program import Launch
from forebay.rewriter.switches import Switches


def products(folder: Path) -> Tiny:
    weights = {"a": torch.randn(12, 8), "b": torch.randn(8, 12), "v": torch.randn(12)}

    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        x = graph.call_function(aten.linear.default, (nodes["x"], nodes["a"]))  # [3, 4, 8] -> [3, 4, 12]
        x = graph.call_function(aten.view.default, (x, [12, 12]))
        x = graph.call_function(aten.linear.default, (x, nodes["b"]))
        return (graph.call_function(aten.addmm.default, (nodes["v"], x, nodes["b"])),)

    return tiny(folder, build, {"x": torch.randn(3, 4, 8)}, weights)


def stamped(gm: fx.GraphModule) -> dict[str, str]:
    return {n.name: n.meta[META].impl for n in gm.graph.nodes if isinstance(n.meta.get(META), Gemm)}


def test_shapes_count_every_leading_dimension_and_both_orientations(tmp_path: Path) -> None:
    shapes = [s for n in products(tmp_path).graph().graph.nodes if (s := product_shape(n))]
    assert shapes == [("float32", 12, 12, 8), ("float32", 12, 8, 12), ("float32", 12, 12, 8)]


def test_tiles_have_shapes_of_their_own(tmp_path: Path) -> None:
    model = products(tmp_path)
    gm = model.graph()
    insert_transfers(gm, plan_for(placements(model, {"a": 5, "b": 0})))
    shapes = [product_shape(n) for n in gm.graph.nodes if n.target is ops.linear_tile]
    assert shapes == [("float32", 12, 5, 8), ("float32", 12, 5, 8), ("float32", 12, 2, 8)]


def test_only_the_shapes_in_the_table_are_stamped(tmp_path: Path) -> None:
    model = products(tmp_path)
    gm = model.graph()
    table = (GemmChoice("float32", 12, 8, 12, "aten"), GemmChoice("bfloat16", 12, 12, 8, "other"))
    select_gemm(gm, replace(plan_for(placements(model, {})), gemm=table))
    linears = [n.name for n in gm.graph.nodes if n.target is aten.linear.default]
    assert stamped(gm) == {linears[1]: "aten"}
    assert torch.equal(run_graph(gm, model.inputs, model.weights)[0], model.expected()[0])


def test_an_empty_table_and_other_operators_are_left_alone(tmp_path: Path) -> None:
    model = chain(tmp_path)
    gm = model.graph()
    select_gemm(gm, plan_for(placements(model, {})))
    assert stamped(gm) == {}
    assert all(product_shape(n) is None for n in gm.graph.nodes if n.target is aten.relu.default)


def launches(plan: Plan, program: object) -> list[Launch]:
    return [i for i in program.step if isinstance(i, Launch) and i.op == "forebay.linear"]  # type: ignore[attr-defined]


def test_the_planned_implementation_reaches_the_launch_and_computes_the_same(tmp_path: Path) -> None:
    model = chain(tmp_path, width=64)
    plan, program = planned(model, Budget(40_000))
    chosen = {(c.dtype, c.m, c.n, c.k): c.impl for c in plan.gemm}
    for item in launches(plan, program):
        x, w, _ = item.args
        assert item.impl == chosen[w.dtype, x.shape[0], w.shape[0], w.shape[1]]
    torch.testing.assert_close(run_program(program, plan, model)[0], model.expected()[0], rtol=1e-5, atol=1e-5)


def test_skipped_it_leaves_the_choice_to_the_kernel(tmp_path: Path) -> None:
    model = chain(tmp_path, width=64)
    plan, program = planned(model, Budget(40_000), switches=Switches(skip=("select_gemm",)))
    assert plan.gemm == () and all(item.impl == "" for item in launches(plan, program))
    torch.testing.assert_close(run_program(program, plan, model)[0], model.expected()[0], rtol=1e-5, atol=1e-5)
