"""The predicted step: bounded by its busiest lane, faster with overlap, and the same for every step."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import chain, lowered, placements, plan_for, planned

from forebay.rewriter.ir.plan import Budget
from forebay.rewriter.ir.program import COMPUTE, DISK, Band, Copy, FileSlice, Program, Span
from forebay.rewriter.machine.profile import CPU_COPY_ISSUE_S, Link, Machine, Tier
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.simulate import CORES, item_cost, simulate


def machine(disk_bytes_per_s: float, dispatch_s: float = 1e-3) -> Machine:
    links = (Link("disk", "device", disk_bytes_per_s, 0.0, "direct"),)
    tiers = Machine.default().tiers | {"device": Tier(4 << 30, 2e15)}
    return replace(Machine.default(), tiers=tiers, links=links, dispatch_s=dispatch_s, memory_bytes_per_s=1e15, gemm=(),
                   product_flops=0.0)


def streamed(folder: Path, slots: int, layers: int = 6, lead: int | None = None, hoist: bool = True) -> Program:
    model = chain(folder, layers)
    plan = plan_for(placements(model, {n: 0 for n in model.weights if n[0] == "w"}), slots, lead, arena=1 << 17)
    return lowered(model, plan, hoist)


COMPUTE_S = 12e-3  # six layers of two launches, 1 ms each
COPY_S = 6 * 4096 / 1e6  # at 1 MB/s
ISSUE_S = CPU_COPY_ISSUE_S  # of the computing thread, per copy


def test_a_disk_bound_step_takes_as_long_as_its_reads(tmp_path: Path) -> None:
    line = simulate(streamed(tmp_path, slots=3), machine(1e6))
    assert line.bottleneck == DISK
    assert line.busy_time_s[DISK] == pytest.approx(COPY_S)
    assert line.busy_time_s[COMPUTE] == pytest.approx(COMPUTE_S)
    assert COPY_S <= line.time_s <= COPY_S + 2e-3, "all compute but a launch or two hides behind reads"


def test_a_compute_bound_step_takes_as_long_as_its_launches(tmp_path: Path) -> None:
    line = simulate(streamed(tmp_path, slots=3), machine(1e9))
    assert line.bottleneck == COMPUTE
    assert line.time_s == pytest.approx(COMPUTE_S + 6 * ISSUE_S, rel=0.01)


def test_cores_that_bear_reads_compute_the_less(tmp_path: Path) -> None:
    """All of the reads where the share is 1; a GPU's steps are none of the host's cores' business."""
    program, plain = streamed(tmp_path, slots=3), machine(2e6)
    shared = replace(plain, reads_core_share=1.0)
    assert simulate(program, plain).time_s < COMPUTE_S + COPY_S / 2 - 2e-3
    bound = simulate(program, shared)
    assert bound.time_s == pytest.approx(COMPUTE_S + COPY_S / 2 + 6 * ISSUE_S) and bound.bottleneck == CORES
    assert simulate(program, plain).bottleneck != CORES
    gpu = [simulate(program, replace(m, device_kind="H100")).time_s for m in (plain, shared)]
    assert gpu[0] == gpu[1]


def test_cores_without_copies_only_compute(tmp_path: Path) -> None:
    """A step that is all launches lasts as long as these: nothing of the disk is there to bear."""
    model = chain(tmp_path, 6)
    line = simulate(lowered(model, plan_for(placements(model, {}), 0, None, arena=1 << 17), True),
                    replace(machine(1e6), reads_core_share=1.0))
    assert line.time_s == pytest.approx(COMPUTE_S) and line.bottleneck == COMPUTE


def test_one_slot_overlaps_nothing_but_what_follows_its_release(tmp_path: Path) -> None:
    one, three = (simulate(streamed(tmp_path, slots), machine(1e6)).time_s for slots in (1, 3))
    assert one > three
    assert one == pytest.approx(COPY_S + 6e-3, rel=0.01), "each read waits for a product, and only the relu hides"


def test_without_hoisting_a_step_is_slower(tmp_path: Path) -> None:
    early = simulate(streamed(tmp_path, 3), machine(2e6)).time_s
    late = simulate(streamed(tmp_path, 3, lead=1, hoist=False), machine(2e6)).time_s
    assert late > 1.2 * early


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_spans_of_a_lane_follow_each_other_and_add_up(tmp_path: Path, slots: int) -> None:
    line = simulate(streamed(tmp_path, slots, layers=5), machine(1e6))
    for lane, busy in line.busy_time_s.items():
        spans = sorted((start, end) for s, _, start, end in line.spans if s == lane)
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(spans))
        assert sum(end - start for start, end in spans) == pytest.approx(busy)
    assert line.time_s >= max(line.busy_time_s.values()) - 1e-9
    assert len([1 for s, *_ in line.spans if s == COMPUTE]) == 10
    assert len([1 for s, *_ in line.spans if s == DISK]) == 5, "a steady step issues as many reads as it uses"


def test_the_plan_carries_the_prediction_of_its_own_program(tmp_path: Path) -> None:
    plan, program = planned(chain(tmp_path, width=64), Budget(30_000))
    line = simulate(program, Machine.default())
    assert plan.prediction.decode_time_s == line.time_s
    assert plan.prediction.busy_time_s == line.busy_time_s
    assert plan.prediction.streamed_nbytes == program.streamed_nbytes() == plan.nbytes_on("disk")
    assert plan.prediction.peak_nbytes["device"] == plan.arenas["device"] + program.workspace_nbytes() <= 30_000


def test_a_copy_takes_its_thread_longer_by_each_slice_that_it_reads() -> None:
    """Experts lie apart in their files; those that meet come in one read. A GPU's copies have threads of their own."""
    page, apart = 4096, 1 << 20

    def table(*places: int) -> FileSlice:
        return FileSlice("w", 0, page * len(places), tuple(Band(at, 1, page, ((0, page),)) for at in places))

    ten, meeting = table(*range(0, 10 * apart, apart)), table(0, page, 2 * page, apart)
    assert (ten.slices, meeting.slices, FileSlice("w", 0, page).slices) == (10, 2, 1)
    rows = FileSlice("w", 0, 6 * page, (Band(0, 3, apart, ((0, page),)), Band(4 * apart, 3, 2 * page, ((0, page),))))
    assert rows.slices == 4, "rows with little between them are read together"
    machine = replace(Machine.default(), slice_issue_s=3e-5)
    for slices, source in ((10, ten), (2, meeting)):
        copy = Copy(DISK, source, Span("device", 0, source.nbytes, "slot0:0"), "fetch")
        for each, extra in ((machine, 3e-5 * (slices - 1)), (replace(machine, device_kind="NVIDIA H200"), 0.0)):
            times = MachineEstimator(each)
            assert item_cost(copy, times).issue_s == pytest.approx(times.copy_issue_s + extra)
