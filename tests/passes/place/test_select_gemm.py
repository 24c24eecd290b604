"""select_gemm stamps matrix products with the implementation that the plan names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import Tiny, aten, chain, completed, placements, plan_for, planned, run_graph, run_program, tiny
from torch import fx

from forebay.passes.lower.launches import LoweringError
from forebay.passes.lower.lower import lower
from forebay.passes.place.allocate_buffers import allocate_buffers
from forebay.passes.place.insert_transfers import insert_transfers
from forebay.passes.place.select_gemm import select_gemm
from forebay.rewriter.ir import ops
from forebay.rewriter.ir.graph import META, Gemm
from forebay.rewriter.ir.plan import Budget, GemmChoice, Plan, PlanError
from forebay.rewriter.ir.products import product_shape
from forebay.rewriter.ir.program import Launch


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


def test_the_table_is_obeyed_and_a_shape_that_it_lacks_is_named(tmp_path: Path) -> None:
    model = products(tmp_path)
    gm = model.graph()
    table = (GemmChoice("float32", 12, 8, 12, "aten"), GemmChoice("float32", 12, 12, 8, "other"))
    select_gemm(gm, replace(plan_for(placements(model, {})), gemm=table))
    kinds = {n.name: n.target for n in gm.graph.nodes}
    assert [(kinds[name], impl) for name, impl in stamped(gm).items()] == [
        (aten.linear.default, "other"), (aten.linear.default, "aten"), (aten.addmm.default, "other")]
    assert torch.equal(run_graph(gm, model.inputs, model.weights)[0], model.expected()[0])
    with pytest.raises(PlanError, match=r"plan\.gemm: linear.* m=12, n=12, k=8, for which the plan names no"):
        select_gemm(model.graph(), replace(plan_for(placements(model, {})), gemm=table[:1]))


def test_other_operators_are_left_alone(tmp_path: Path) -> None:
    gm = tiny(tmp_path, lambda g, n: (g.call_function(aten.relu.default, (n["x"],)),), {"x": torch.ones(2, 2)},
              {"w": torch.zeros(1)}).graph()
    select_gemm(gm, plan_for({}))
    assert stamped(gm) == {} and all(product_shape(n) is None for n in gm.graph.nodes)


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


def test_a_product_without_an_implementation_is_not_lowered(tmp_path: Path) -> None:
    model = chain(tmp_path)
    gm = model.graph()
    plan = completed(gm, plan_for(placements(model, {})))
    allocate_buffers(gm, plan)
    with pytest.raises(LoweringError, match=r"linear.* is a matmul without an implementation; select_gemm"):
        lower(gm, plan, model.files, lambda launch: launch)
