"""Lowered Programs: proved, run on the thread device, equal to eager; and refused when anything is left out."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import Tiny, allocated, aten, chain, lowered, placements, plan_for, planned, run_program, tiny
from torch import fx

from forebay.passes.lower.launches import LoweringError
from forebay.passes.lower.lower import lower
from forebay.passes.place.insert_transfers import insert_transfers
from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.ir.plan import Budget, Plan
from forebay.rewriter.ir.program import (
    COMPUTE,
    DISK,
    UPLOAD,
    Copy,
    FileSlice,
    Launch,
    Program,
    Record,
    Release,
    Rows,
    Wait,
)
from forebay.rewriter.planning.options import Options
from forebay.rewriter.verify.program import ProgramError, verify_program


def no_workspace(launch: Launch) -> Launch:
    return launch


def streaming(model: Tiny, slots: int = 2, lead: int | None = None, tile_rows: int = 0) -> Plan:
    return plan_for(placements(model, {n: tile_rows for n in model.weights if n[0] == "w"}), slots, lead)


def shape_of(program: Program) -> list[tuple[str, str]]:
    return [(type(i).__name__, i.stream) for i in program.step if not isinstance(i, Release)]


def test_three_layers_through_two_slots_item_by_item(tmp_path: Path) -> None:
    model = chain(tmp_path)
    program = lowered(model, streaming(model))
    assert [type(i).__name__ for i in program.prologue] == ["Copy", "Record"] * 2
    layer = [("Wait", COMPUTE), ("Launch", COMPUTE), ("Record", COMPUTE)]
    fetch = [("Wait", DISK), ("Copy", DISK), ("Record", DISK)]
    relu = [("Launch", COMPUTE)]
    # w0; w2 into its slot; w1; w2; then both slots for the next step, w0 first
    assert shape_of(program) == [*layer, *fetch, *relu, *layer, *relu, *layer, *fetch, *fetch, *relu]
    copies = [i.label for i in program.step if isinstance(i, Copy)]
    assert copies == ["fetch w2", "fetch w0", "fetch w1"]
    assert program.streamed_nbytes() == 3 * 32 * 32 * 4


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("tile_rows", [0, 7])
def test_every_slot_ring_is_proved_and_computes_the_same(
    tmp_path: Path, layers: int, slots: int, tile_rows: int
) -> None:
    """Among them rings whose depth does not divide the number of copies: the next step starts elsewhere in the ring."""
    model = chain(tmp_path, layers)
    for lead in range(1, slots + 1):
        for hoist in (True, False):
            plan = streaming(model, slots, lead, tile_rows)
            program = lowered(model, plan, hoist)
            verify_program(program)
            assert program.streamed_nbytes() == layers * 32 * 32 * 4
            got = run_program(program, plan, model, steps=3, poison=True)[0]
            torch.testing.assert_close(got, model.expected()[0], rtol=1e-5, atol=1e-5)


def test_resident_weights_need_no_copy_no_event_and_no_prologue(tmp_path: Path) -> None:
    model = chain(tmp_path)
    plan = plan_for(placements(model, {}))
    program = lowered(model, plan)
    verify_program(program)
    assert program.prologue == () and {type(i) for i in program.step} == {Launch, Release}
    torch.testing.assert_close(run_program(program, plan, model)[0], model.expected()[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Wait, Record, Copy, Release])
def test_nothing_can_be_left_out(tmp_path: Path, kind: type) -> None:
    """Memory freed while a copy still reads it, a load nobody waited for: each missing item is found. (With an even
    number of copies through two slots; else a Wait of the step's end may be implied by the one before it.)"""
    model = chain(tmp_path, layers=2)
    program = lowered(model, streaming(model, tile_rows=11))
    places = [i for i, item in enumerate(program.step) if isinstance(item, kind)]
    assert len(places) >= 6
    for place in places:
        broken = replace(program, step=(*program.step[:place], *program.step[place + 1 :]))
        with pytest.raises(ProgramError):
            verify_program(broken)


def test_copies_land_where_direct_reads_need_no_second_copy(tmp_path: Path) -> None:
    model = chain(tmp_path)
    plan = streaming(model, tile_rows=13)
    program = lowered(model, plan)
    slots = {b.name: b for b in plan.buffers if b.kind == "slot"}
    for item in program.step:
        if isinstance(item, Copy):
            assert isinstance(item.src, FileSlice)
            slot = slots[item.dst.buffer.split(":")[0]]
            assert (item.dst.offset - slot.offset - item.src.offset) % PAGE_NBYTES == 0
            before, after = item.room
            assert slot.offset <= item.dst.offset - before
            assert item.dst.offset + item.dst.nbytes + after <= slot.offset + slot.nbytes


def gathering(folder: Path) -> Tiny:
    weights = {"table": torch.randn(50, 16), "w0": torch.randn(16, 16)}

    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        ids = graph.call_function(aten.add.Scalar, (nodes["ids"], 1))
        x = graph.call_function(aten.embedding.default, (nodes["table"], ids))
        y = graph.call_function(aten.embedding.default, (nodes["table"], nodes["ids"]))
        x = graph.call_function(aten.add.Tensor, (x, y))
        x = graph.call_function(aten.linear.default, (x, nodes["w0"]))
        return (graph.call_function(aten.linear.default, (x, nodes["table"])),)

    return tiny(folder, build, {"ids": torch.tensor([[3, 48, 0], [3, 3, 7]])}, weights)


def tied_plan(model: Tiny, slots: int = 2) -> Plan:
    ways = placements(model, {"table": "gather", "w0": 0})
    ways["table"] = replace(ways["table"], tile_rows=9)
    return plan_for(ways, slots)


def test_lookup_moves_only_the_rows_it_names_and_the_tied_head_streams(tmp_path: Path) -> None:
    model = gathering(tmp_path)
    plan = tied_plan(model)
    program = lowered(model, plan)
    verify_program(program)
    rows = [i for i in program.step if isinstance(i, Copy) and isinstance(i.src, Rows)]
    assert [(i.src.row_nbytes, i.src.rows, i.dst.nbytes) for i in rows] == [(64, 50, 6 * 64)] * 2
    assert program.streamed_nbytes() == 50 * 64 + 16 * 64, "the table is not copied twice for its two uses"
    got = run_program(program, plan, model, poison=True)[0]
    torch.testing.assert_close(got, model.expected()[0], rtol=1e-5, atol=1e-5)
    hasty = tuple(i for i in program.step if not (isinstance(i, Wait) and i.stream == COMPUTE))
    with pytest.raises(ProgramError, match="without waiting for gather table"):
        verify_program(replace(program, step=hasty))


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_two_hops_through_host_slots(tmp_path: Path, slots: int) -> None:
    """What a GPU needs, run here: disk to host slot, host slot to device slot, each freed by an event of its reader."""
    model = chain(tmp_path, layers=3, width=64)
    options = Options(slots=slots, slot_nbytes=5000)
    plan, program = planned(model, Budget(2 * 4096 + slots * 12288 + 4000), options, host_hop=True)
    assert plan.schedule.host_hop and plan.schedule.slots == slots and plan.nbytes_on("disk") > 30_000
    assert {i.stream for i in program.step} == {COMPUTE, DISK, UPLOAD}
    assert all(i.dst.arena == "host" for i in program.step if isinstance(i, Copy) and i.stream == DISK)
    got = run_program(program, plan, model, steps=3, poison=True)[0]
    torch.testing.assert_close(got, model.expected()[0], rtol=1e-5, atol=1e-5)
    for i, item in enumerate(program.step):
        if isinstance(item, Wait) and item.stream in (COMPUTE, UPLOAD):
            broken = replace(program, step=(*program.step[:i], *program.step[i + 1 :]))
            with pytest.raises(ProgramError):
                verify_program(broken)


def assorted(folder: Path) -> Tiny:
    """What the other graphs lack: permuted results, several results, slices as outputs, an operator without out form,
    a matrix product of a transposed operand, other dtypes."""
    weights = {"w0": torch.randn(8, 8), "k": torch.randn(3, 8)}

    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        def call(op: object, *args: object, **kwargs: object) -> fx.Node:
            return graph.call_function(op, args, kwargs)  # type: ignore[arg-type]

        x = call(aten.add.Tensor, nodes["x"], 1.0)  # [4, 6, 8]
        turned = call(aten.transpose.int, x, 1, 2)  # [4, 8, 6], a view
        y = call(aten.mul.Tensor, turned, turned)  # the same strides
        back = call(aten.transpose.int, y, 1, 2)
        product = call(aten.linear.default, back, nodes["w0"])
        strided = call(aten.linear.default, call(aten.slice.Tensor, product, 1, 0, 3), nodes["w0"])
        top = call(aten.topk.default, strided, 2)
        values, index = call(operator.getitem, top, 0), call(operator.getitem, top, 1)
        flat = call(aten.reshape.default, turned, [4, 48])
        normed = call(aten.native_layer_norm.default, flat, [48], None, None, 1e-5)
        sixteen = call(aten._to_copy.default, call(operator.getitem, normed, 0), dtype=torch.bfloat16)
        return (call(aten.slice.Tensor, product, 2, 2, 5), values, index, sixteen, call(aten.one_hot.default, index, 8),
                call(aten.mm.default, nodes["k"], call(aten.t.default, nodes["k"])))

    return tiny(folder, build, {"x": torch.randn(4, 6, 8)}, weights)


@pytest.mark.parametrize("reuse", [True, False])
def test_permuted_sliced_and_many_results(tmp_path: Path, reuse: bool) -> None:
    model = assorted(tmp_path)
    plan = plan_for(placements(model, {"w0": 5}))
    program = lowered(model, plan, reuse=reuse)
    verify_program(program)
    for ours, expected in zip(run_program(program, plan, model, poison=True), model.expected(), strict=True):
        assert ours.shape == expected.shape and ours.dtype == expected.dtype
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_writes_in_place_are_not_lost(tmp_path: Path) -> None:
    """An operator that returns the argument it wrote is work to do, although its result needs no memory."""

    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        y = graph.call_function(aten.mul.Tensor, (nodes["x"], 0.0))
        part = graph.call_function(aten.select.int, (y, 0, 1))
        filled = graph.call_function(aten.fill_.Scalar, (part, 5.0))
        more = graph.call_function(aten.add.Tensor, (filled, 1.0))
        return (y, more)

    model = tiny(tmp_path, build, {"x": torch.ones(3, 4)}, {"w": torch.zeros(1)})
    plan = plan_for(placements(model, {}))
    program = lowered(model, plan)
    verify_program(program)
    for ours, expected in zip(run_program(program, plan, model), model.expected(), strict=True):
        assert torch.equal(ours, expected)


def test_slices_that_are_assigned_fill_their_memory(tmp_path: Path) -> None:
    """The functional copy into every second element is a tensor with gaps, which nothing would write."""

    def build(graph: fx.Graph, nodes: Mapping[str, fx.Node]) -> object:
        y = graph.call_function(aten.mul.Tensor, (nodes["x"], 2.0))
        even, odd = (graph.call_function(aten.slice.Tensor, (y, 1, i, 9, 2)) for i in (0, 1))
        taken = graph.call_function(aten.copy.default, (odd, even))
        return (graph.call_function(aten.slice_scatter.default, (y, taken, 1, 1, 9, 2)),)

    model = tiny(tmp_path, build, {"x": torch.randn(3, 8)}, {"w": torch.zeros(1)})
    plan = plan_for(placements(model, {}))
    program = lowered(model, plan)
    verify_program(program)
    assert torch.equal(run_program(program, plan, model, poison=True)[0], model.expected()[0])


def test_empty_values_lie_in_the_arena(tmp_path: Path) -> None:
    model = tiny(tmp_path, lambda g, n: (g.call_function(aten.linear.default, (
        g.call_function(aten.slice.Tensor, (g.call_function(aten.relu.default, (n["x"],)), 1, 8, 16)), n["w0"])),),
        {"x": torch.randn(0, 16)}, {"w0": torch.randn(16, 8)})
    plan = plan_for(placements(model, {"w0": 4}))
    program = lowered(model, plan)
    verify_program(program)
    assert run_program(program, plan, model)[0].shape == (0, 16)


def test_before_allocate_buffers_it_refuses(tmp_path: Path) -> None:
    model = chain(tmp_path)
    gm = model.graph()
    with pytest.raises((AssertionError, KeyError)):
        lower(gm, plan_for(placements(model, {})), model.files, no_workspace)


def test_weight_without_a_file_and_slot_too_small_are_named(tmp_path: Path) -> None:
    model = chain(tmp_path)
    plan = streaming(model)
    gm = model.graph()
    insert_transfers(gm, plan)
    plan = allocated(gm, plan)
    with pytest.raises(KeyError, match="w1 is on the disk tier, but no file"):
        lower(gm, plan, {k: v for k, v in model.files.items() if k != "w1"}, no_workspace)
    small = plan_for(placements(model, {"w0": 0}), slot_nbytes=4096)
    gm = model.graph()
    insert_transfers(gm, small)
    small = allocated(gm, small)
    with pytest.raises(ValueError, match="4096 bytes do not fit slot0 of 4096 bytes"):
        lower(gm, small, model.files, no_workspace)


def test_a_call_that_is_no_operator_is_named(tmp_path: Path) -> None:
    model = tiny(tmp_path, lambda g, n: (g.call_function(torch.sin, (n["x"],)),), {"x": torch.ones(2)},
                 {"w": torch.zeros(1)})
    plan = plan_for(placements(model, {}))
    with pytest.raises(LoweringError, match="sin"):
        lowered(model, plan)
