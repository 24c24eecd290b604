"""Each thing that a pass must leave behind, broken by hand: it is found, and the pass and the node are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import FAMILIES, captured
from tiny import aten, chain, placements, plan_for, planned
from torch import fx

import forebay.rewriter.pipeline.pass_list as pipeline
import forebay.rewriter.pipeline.run_passes as run_passes
from forebay.passes.place.insert_transfers import insert_transfers
from forebay.rewriter.capture.concretise import concretise
from forebay.rewriter.capture.step_graphs import step_inputs
from forebay.rewriter.ir import ops
from forebay.rewriter.ir.graph import META, Gemm, Transfer, WeightInput, block_graphs
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.ir.state import StateInput
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.switches import Switches
from forebay.rewriter.verify.graph import GraphError, check_captured, check_concrete

Break = Callable[[fx.GraphModule], object]


@pytest.fixture
def tiled(tmp_path: Path) -> fx.GraphModule:
    """A flat graph whose products are split into tiles, fetched and released."""
    model = chain(tmp_path, width=32)
    gm = model.graph()
    insert_transfers(gm, plan_for(placements(model, {"w0": 16, "w1": 0})))
    check_concrete(gm, "insert_transfers")
    return gm


def node(gm: fx.GraphModule, target: object) -> fx.Node:
    return gm.graph.find_nodes(op="call_function", target=target)[0]


def mark(target: object, value: object) -> Break:
    return lambda gm: node(gm, target).meta.update({META: value})


def value(target: object, change: Callable[[torch.Tensor], object]) -> Break:
    return lambda gm: node(gm, target).meta.update(val=change(node(gm, target).meta["val"]))


def released_early(gm: fx.GraphModule) -> None:
    node(gm, ops.fetch).append(node(gm, ops.release))


def released_twice(gm: fx.GraphModule) -> None:
    first = node(gm, ops.release)
    with gm.graph.inserting_after(first):
        again = gm.graph.call_function(ops.release, first.args)
    again.meta = dict(first.meta)


def released_unfetched(gm: fx.GraphModule) -> None:
    made = node(gm, ops.new_output)
    with gm.graph.inserting_after(made):
        gm.graph.call_function(ops.release, (made,)).meta = {"val": None}


def read_before_it_is_made(gm: fx.GraphModule) -> None:
    first, *_, last = gm.graph.find_nodes(op="call_function", target=aten.relu.default)
    first.prepend(last)


def shows(target: object, base: Callable[[fx.GraphModule], fx.Node]) -> Break:
    return lambda gm: node(gm, target).meta.update(alias_of=base(gm))


@pytest.mark.parametrize(("harm", "message"), [
    (lambda gm: node(gm, aten.relu.default).meta.pop("val"), r"relu_default has no meta\['val'\]"),
    (value(aten.relu.default, lambda v: None), r"relu_default gives \[.*says \[\]"),
    (value(aten.relu.default, lambda v: v.new_empty(3, 32)), r"relu_default gives .*\(2, 32\).*says .*\(3, 32\)"),
    (value(aten.relu.default, lambda v: v.new_empty(32, 2).mT), "relu_default gives .*says"),
    (value(aten.relu.default, lambda v: v.half()), "relu_default gives .*says .*float16"),
    (value(ops.fetch, lambda v: v.new_empty(15, 32)), "fetch gives"),
    (value(ops.release, lambda v: torch.empty(1, device="meta")), r"release gives \[\]"),
    (shows(aten.relu.default, lambda gm: node(gm, ops.new_output)), "relu_default shows storage of its own, and"),
    (mark(ops.fetch, None), "fetch is fetch number 0 of its graph and is marked None"),
    (mark(ops.fetch, Transfer(5, "w0", 0, 16, 0)), "fetch is fetch number 0"),
    (mark(ops.fetch, Gemm("flat")), "fetch is marked Gemm"),
    (mark(ops.linear_tile, "flat"), "linear_tile is marked 'flat'; a call_function may bear Gemm"),
    (lambda gm: gm.graph.find_nodes(op="placeholder")[0].meta.update({META: "x"}), "x is marked 'x'; a placeholder may "
     "bear WeightInput or StateInput"),
    (lambda gm: gm.graph.erase_node(node(gm, ops.release)), "fetch has 0 releases"),
    (released_twice, "fetch has 2 releases"),
    (released_early, "fetch is released before linear_tile reads it"),
    (released_unfetched, "is released and was not fetched"),
    (read_before_it_is_made, "graph.lint"),
])
def test_what_is_broken_is_found_and_named(tiled: fx.GraphModule, harm: Break, message: str) -> None:
    harm(tiled)
    with pytest.raises(GraphError, match=rf"^some_pass left the step graph unsound: .*{message}"):
        check_concrete(tiled, "some_pass")


@pytest.mark.parametrize("harm", [
    value(aten.relu.default, lambda v: v.new_empty(3, 32)), value(ops.fetch, lambda v: v.new_empty(15, 32)),
    shows(aten.relu.default, lambda gm: node(gm, ops.new_output)),
    lambda gm: setattr(node(gm, aten.relu.default), "args", (gm.graph.find_nodes(op="placeholder")[-1],)),
    lambda gm: setattr(node(gm, aten.relu.default), "target", aten.sum.default)])
def test_what_was_sound_before_is_looked_at_again_once_it_changes(tiled: fx.GraphModule, harm: Break) -> None:
    """And not before: its operations are not run again."""
    sound: dict[fx.Node, tuple] = {}
    check_concrete(tiled, "a_pass", sound)
    calls = [n for n in tiled.graph.nodes if n.op == "call_function"]
    assert [*sound] == calls
    kept = dict(sound)
    check_concrete(tiled, "a_pass", sound)
    assert all(sound[n] is kept[n] for n in calls)
    harm(tiled)
    with pytest.raises(GraphError, match=r"^some_pass left the step graph unsound: "):
        check_concrete(tiled, "some_pass", sound)


def views(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.meta.get("alias_of") is not None]


def view_of_a_view(gm: fx.GraphModule) -> None:
    inner = next(n for n in views(gm) if any(a in views(gm) for a in n.all_input_nodes))
    inner.meta["alias_of"] = next(a for a in inner.all_input_nodes if a in views(gm))


def call_within(gm: fx.GraphModule) -> None:
    output = gm.graph.output_node()
    gm.add_submodule("other", fx.GraphModule({}, fx.Graph()))
    with gm.graph.inserting_before(output):
        gm.graph.call_module("other").meta = {"val": None}


@pytest.mark.parametrize(("harm", "message"), [
    (view_of_a_view, "which is itself a view|alias_of names"),
    (lambda gm: views(gm)[0].meta.update(alias_of=None), "shows the storage of .* says that it has its own"),
    (lambda gm: views(gm)[0].meta.update(alias_of=list(gm.graph.nodes)[-2]), "alias_of names"),
    (call_within, "calls a block from within a block"),
])
def test_views_and_calls_within_blocks(harm: Break, message: str) -> None:
    model = captured("llama")
    step = concretise(model.step, step_inputs(model, Workload(2, 3, 1), 3))
    check_concrete(step, "nothing")
    harm(block_graphs(step)["block_0"])
    with pytest.raises(GraphError, match=rf"^some_pass left block_0 unsound: .*({message})"):
        check_concrete(step, "some_pass")


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_graphs_are_sound_and_told_when_not(family: str) -> None:
    model = rewrite_captured(captured(family), Switches())
    check_captured(model.step, "nothing")
    name, block = next(iter(model.blocks().items()))
    product = next(n for n in block.graph.nodes if n.op == "call_function" and isinstance(n.meta["val"], torch.Tensor)
                   and n.meta["val"].dim() == 3)
    product.meta["val"] = product.meta["val"][..., :-1]
    with pytest.raises(GraphError, match=rf"^a_fusion left {name} unsound: {product.name} gives"):
        check_captured(model.step, "a_fusion")


def test_a_captured_graph_that_does_not_run_is_told() -> None:
    model = rewrite_captured(captured("llama"), Switches())
    for block in model.blocks().values():
        attention = node(block, torch.ops.forebay.attention.default)
        attention.args = (attention.args[1], attention.args[1], attention.args[1].users and "no", *attention.args[3:])
    with pytest.raises(GraphError, match="a_fusion left captured graphs that do not run"):
        check_captured(model.step, "a_fusion")


@pytest.mark.parametrize(("name", "switched", "found"), [
    ("insert_transfers", Switches(verify_graphs=True), True), ("select_gemm", Switches(bisect=True), True),
    ("insert_transfers", Switches(), False)])
def test_the_pass_that_breaks_a_graph_is_named_where_graphs_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, switched: Switches, found: bool
) -> None:
    monkeypatch.setattr(run_passes, "ALWAYS_CHECK", False)
    checked: list[str] = []

    def check(gm: fx.GraphModule, passed: str, sound: dict[fx.Node, tuple]) -> None:
        checked.append(passed)
        check_concrete(gm, passed, sound)

    monkeypatch.setattr(run_passes, "check_concrete", check)
    known = {each.name: each for each in pipeline.PASSES}

    def run(gm: fx.GraphModule, *given: object) -> None:
        known[name].run(gm, *given)
        node(gm, aten.relu.default).meta["made_by"] = "x"
        if found:
            node(gm, aten.relu.default).meta["val"] = torch.empty(1, device="meta")

    run.__name__ = name
    monkeypatch.setattr(pipeline, "PASSES", [replace(e, run=run) if e.name == name else e for e in pipeline.PASSES])
    model = chain(tmp_path, width=64)
    if found:
        with pytest.raises(GraphError, match=rf"^{name} left the step graph unsound: relu_default"):
            planned(model, Budget(30_000), switches=switched)
    else:
        planned(model, Budget(30_000), switches=switched)
        assert checked == [], "it costs nothing where it is off"


def test_marks_of_every_kind_are_known() -> None:
    model = captured("llama")
    marks = {type(n.meta.get(META)) for n in model.step.graph.find_nodes(op="placeholder")}
    assert marks == {WeightInput, StateInput, type(None)}
