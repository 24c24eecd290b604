"""hoist_prefetch issues copies early, in order, and never into a slot that is still read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import Tiny, aten, chain, placements, plan_for, run_graph, tiny
from torch import fx

from forebay.passes.hoist_prefetch import hoist_prefetch
from forebay.passes.insert_transfers import insert_transfers
from forebay.rewriter import ops
from forebay.rewriter.graph import META
from forebay.rewriter.plan import Plan, PlanError


def streamed(model: Tiny, slots: int, lead: int, tile_rows: int = 0) -> tuple[fx.GraphModule, Plan]:
    plan = plan_for(placements(model, {n: tile_rows for n in model.weights if n[0] == "w"}), slots, lead)
    gm = model.graph()
    insert_transfers(gm, plan)
    return gm, plan


def order(gm: fx.GraphModule) -> list[tuple[str, int]]:
    """Fetches and releases with their number, as they stand."""
    found = []
    for node in gm.graph.nodes:
        if node.target is ops.fetch:
            found.append(("fetch", node.meta[META].index))
        elif node.target is ops.release:
            found.append(("release", node.args[0].meta[META].index))
    return found


@pytest.mark.parametrize(
    ("layers", "slots", "lead"), [(3, 2, 2), (3, 2, 1), (4, 3, 2), (5, 3, 3), (1, 2, 2), (2, 4, 4)])
def test_fetch_stands_lead_copies_ahead(tmp_path: Path, layers: int, slots: int, lead: int) -> None:
    model = chain(tmp_path, layers)
    gm, plan = streamed(model, slots, lead)
    hoist_prefetch(gm, plan)
    gm.graph.lint()
    expected = [("fetch", j) for j in range(min(lead, layers))]
    for j in range(layers):
        expected.append(("release", j))
        if j + lead < layers:
            expected.append(("fetch", j + lead))
    assert order(gm) == expected
    assert torch.equal(run_graph(gm, model.inputs, model.weights)[0], model.expected()[0])


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize("tile_rows", [0, 5])
def test_no_slot_is_taken_before_its_release(tmp_path: Path, slots: int, tile_rows: int) -> None:
    model = chain(tmp_path, 3)
    gm, plan = streamed(model, slots, slots, tile_rows)
    hoist_prefetch(gm, plan)
    gm.graph.lint()
    slot_of = {n.meta[META].index: n.meta[META].slot for n in gm.graph.nodes if n.target is ops.fetch}
    held: dict[int, int] = {}
    numbers = []
    for kind, number in order(gm):
        if kind == "fetch":
            numbers.append(number)
            assert slot_of[number] not in held
            held[slot_of[number]] = number
        else:
            assert held.pop(slot_of[number]) == number
    assert not held and numbers == sorted(numbers)
    got, expected = run_graph(gm, model.inputs, model.weights)[0], model.expected()[0]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_graph_without_fetches_is_left_alone(tmp_path: Path) -> None:
    model = chain(tmp_path)
    gm = model.graph()
    before = [n.name for n in gm.graph.nodes]
    hoist_prefetch(gm, plan_for(placements(model, {})))
    assert [n.name for n in gm.graph.nodes] == before


def test_running_it_twice_changes_nothing(tmp_path: Path) -> None:
    gm, plan = streamed(chain(tmp_path, 5), 3, 2)
    hoist_prefetch(gm, plan)
    once = [n.name for n in gm.graph.nodes]
    hoist_prefetch(gm, plan)
    assert [n.name for n in gm.graph.nodes] == once


def both_at_once(folder: Path) -> Tiny:
    """x * (s + t): one operator that needs two streamed weights, neither of which can be tiled."""
    weights = {"s": torch.randn(8, 8), "t": torch.randn(8, 8)}

    def build(graph: fx.Graph, nodes: dict[str, fx.Node]) -> object:
        both = graph.call_function(aten.add.Tensor, (nodes["s"], nodes["t"]))
        return (graph.call_function(aten.mul.Tensor, (nodes["x"], both)),)

    return tiny(folder, build, {"x": torch.randn(8, 8)}, weights)


def test_an_operator_that_needs_two_slots_at_once(tmp_path: Path) -> None:
    model = both_at_once(tmp_path)
    for slots in (2, 3):
        plan = plan_for(placements(model, {"s": 0, "t": 0}), slots)
        gm = model.graph()
        insert_transfers(gm, plan)
        hoist_prefetch(gm, plan)
        assert torch.equal(run_graph(gm, model.inputs, model.weights)[0], model.expected()[0])
    plan = plan_for(placements(model, {"s": 0, "t": 0}), 1)
    gm = model.graph()
    insert_transfers(gm, plan)
    with pytest.raises(PlanError, match="use more slots"):
        hoist_prefetch(gm, plan)


def test_released_out_of_order_takes_no_slot_early(tmp_path: Path) -> None:
    """The first weight is read again at the end, so the ring waits for it."""
    weights = {f"w{i}": torch.randn(8, 8) for i in range(4)}

    def build(graph: fx.Graph, nodes: dict[str, fx.Node]) -> object:
        x = graph.call_function(aten.add.Tensor, (nodes["x"], nodes["w0"]))
        x = graph.call_function(aten.add.Tensor, (x, nodes["w1"]))
        x = graph.call_function(aten.mul.Tensor, (x, nodes["w0"]))
        x = graph.call_function(aten.add.Tensor, (x, nodes["w2"]))
        return (graph.call_function(aten.add.Tensor, (x, nodes["w3"])),)

    model = tiny(tmp_path, build, {"x": torch.randn(8, 8)}, weights)
    for slots, lead in ((2, 1), (2, 2), (3, 1), (3, 2), (3, 3)):
        gm, plan = streamed(model, slots, lead)
        hoist_prefetch(gm, plan)
        gm.graph.lint()
        held: set[int] = set()
        for kind, number in order(gm):
            if kind == "fetch":
                assert number % slots not in held
                held.add(number % slots)
            else:
                held.discard(number % slots)
        assert torch.equal(run_graph(gm, model.inputs, model.weights)[0], model.expected()[0])
