"""hoist_prefetch issues copies early, in order, and never into a slot that is still read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tiny import Tiny, allocated, aten, chain, lowered, placements, plan_for, run_program, tiny
from torch import fx

from forebay.passes.lower.hoist_prefetch import hoist_prefetch
from forebay.passes.lower.lower import lower
from forebay.passes.place.insert_transfers import insert_transfers
from forebay.rewriter.ir.draft import Draft, Fetch, Free
from forebay.rewriter.ir.plan import Plan, PlanError
from forebay.rewriter.verify.program import verify_program


def streamed(model: Tiny, slots: int, lead: int, tile_rows: int = 0) -> Plan:
    return plan_for(placements(model, {n: tile_rows for n in model.weights if n[0] == "w"}), slots, lead)


def drafted(model: Tiny, plan: Plan) -> Draft:
    gm = model.graph()
    insert_transfers(gm, plan)
    plan = allocated(gm, plan)
    return lower(gm, plan, model.files, lambda launch: launch)


def order(draft: Draft) -> list[tuple[str, int]]:
    """Copies and releases with their number, as they stand."""
    return [("fetch" if isinstance(item, Fetch) else "free", item.index)
            for item in draft.items if isinstance(item, Fetch | Free)]


@pytest.mark.parametrize(
    ("layers", "slots", "lead"), [(3, 2, 2), (3, 2, 1), (4, 3, 2), (5, 3, 3), (1, 2, 2), (2, 4, 4)])
def test_copies_are_issued_lead_ahead(tmp_path: Path, layers: int, slots: int, lead: int) -> None:
    model = chain(tmp_path, layers)
    plan = streamed(model, slots, lead)
    draft = drafted(model, plan)
    hoist_prefetch(draft, plan)
    ahead = min(lead, layers)
    assert draft.prologue == tuple(range(ahead))
    last_in_slot = {j % slots: j for j in range(layers)}
    expected, again = [], 0
    for j in range(layers):
        expected.append(("free", j))
        if j + lead < layers:
            expected.append(("fetch", j + lead))
        while j + lead >= layers - 1 and again < ahead and last_in_slot[again % slots] <= j:
            expected.append(("fetch", again))  # for the next step
            again += 1
    assert order(draft) == expected


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize("tile_rows", [0, 5])
def test_no_slot_is_taken_before_it_is_free(tmp_path: Path, slots: int, tile_rows: int) -> None:
    model = chain(tmp_path, 3)
    plan = streamed(model, slots, slots, tile_rows)
    draft = drafted(model, plan)
    hoist_prefetch(draft, plan)
    held = {j % slots: j for j in draft.prologue}
    issued = list(draft.prologue)
    for kind, number in order(draft):
        if kind == "fetch":
            issued.append(number)
            assert number % slots not in held
            held[number % slots] = number
        else:
            assert held.pop(number % slots) == number
    assert held == {j % slots: j for j in draft.prologue}, "the next step finds what this one found"
    count = len(draft.moves)
    assert issued == [*range(count), *draft.prologue], "in the order of use"


def test_a_step_without_copies_is_left_alone(tmp_path: Path) -> None:
    model = chain(tmp_path)
    plan = plan_for(placements(model, {}))
    draft = drafted(model, plan)
    before = list(draft.items)
    hoist_prefetch(draft, plan)
    assert draft.items == before and draft.prologue == ()


def test_without_it_copies_are_issued_where_they_are_read(tmp_path: Path) -> None:
    """Slow, and as right."""
    model = chain(tmp_path, 3)
    plan = streamed(model, 2, 2)
    assert order(drafted(model, plan)) == [(kind, j) for j in range(3) for kind in ("fetch", "free")]
    program = lowered(model, plan, hoist=False)
    verify_program(program)
    assert program.prologue == ()
    got = run_program(program, plan, model, poison=True)[0]
    torch.testing.assert_close(got, model.expected()[0], rtol=1e-5, atol=1e-5)


def both_at_once(folder: Path) -> Tiny:
    """x * (s + t): one operator that needs two streamed weights, neither of which can be tiled."""
    weights = {"s": torch.randn(8, 8), "t": torch.randn(8, 8)}

    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        both = graph.call_function(aten.add.Tensor, (nodes["s"], nodes["t"]))
        return (graph.call_function(aten.mul.Tensor, (nodes["x"], both)),)

    return tiny(folder, build, {"x": torch.randn(8, 8)}, weights)


def test_an_operator_that_needs_two_slots_at_once(tmp_path: Path) -> None:
    model = both_at_once(tmp_path)
    for slots in (2, 3):
        plan = plan_for(placements(model, {"s": 0, "t": 0}), slots)
        program = lowered(model, plan)
        verify_program(program)
        assert torch.equal(run_program(program, plan, model)[0], model.expected()[0])
    plan = plan_for(placements(model, {"s": 0, "t": 0}), 1)
    with pytest.raises(PlanError, match="use more slots"):
        lowered(model, plan)


def test_released_out_of_order_takes_no_slot_early(tmp_path: Path) -> None:
    """The first weight is read again at the end, so the ring waits for it."""
    weights = {f"w{i}": torch.randn(8, 8) for i in range(4)}

    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        x = graph.call_function(aten.add.Tensor, (nodes["x"], nodes["w0"]))
        x = graph.call_function(aten.add.Tensor, (x, nodes["w1"]))
        x = graph.call_function(aten.mul.Tensor, (x, nodes["w0"]))
        x = graph.call_function(aten.add.Tensor, (x, nodes["w2"]))
        return (graph.call_function(aten.add.Tensor, (x, nodes["w3"])),)

    model = tiny(tmp_path, build, {"x": torch.randn(8, 8)}, weights)
    for slots, lead in ((2, 1), (2, 2), (3, 1), (3, 2), (3, 3)):
        plan = streamed(model, slots, lead)
        program = lowered(model, plan)
        verify_program(program)
        assert torch.equal(run_program(program, plan, model, steps=3, poison=True)[0], model.expected()[0])
