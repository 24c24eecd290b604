"""Measuring leaves a complete, valid profile and nothing else."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from selection import at_length

from forebay.kernels.formats.table import TIMED_WEIGHTS
from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.machine.profile import Link, Machine, machine_from_json
from forebay.runtime.devices.cpu import measure as measure_cpu
from forebay.runtime.devices.cpu.kind import CPU
from forebay.runtime.devices.cuda import measure as measure_cuda
from forebay.runtime.disk.reader import available_kinds, readers_beside
from forebay.runtime.measure import kernels as measure_kernels
from forebay.runtime.measure import machine as measure
from forebay.runtime.measure import steady
from forebay.runtime.measure.machine import DiskTrial, choose_trial, measure_machine


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Machine, list[tuple[str, float]], Path]:
    folder = tmp_path_factory.mktemp("disk")
    stages: list[tuple[str, float]] = []
    with pytest.MonkeyPatch.context() as patch:  # whatever else runs on this machine: what is believed is tested apart
        patch.setattr(measure, "believable", lambda machine: machine)
        patch.setattr(measure.Neighbours, "share", lambda _: 0.0)
        patch.setattr(measure_kernels, "COLD_NBYTES", 4 << 20)  # in the caches: no figure is looked at
        patch.setattr(measure_kernels, "COLD_CACHES", 0)
        patch.setattr(measure_kernels, "QUICK_S", 0.2)
        patch.setattr(steady, "TRIES", 1)  # beside the suite's other work lines fit poorly, and again so
        machine = measure_machine(folder, quick=True, progress=lambda stage, done: stages.append((stage, done)))
    return machine, stages, folder


def test_a_measured_profile_is_complete(measured) -> None:
    machine, _, folder = measured
    assert machine_from_json(machine.to_json()) == machine
    near = "host" if torch.cuda.is_available() else "device"
    assert machine.link("disk", near).method in available_kinds()
    assert machine.link("disk", near).chunk_nbytes > 0
    for src, dst in ((near, "disk"), ("host", "device"), ("device", "host")):
        machine.link(src, dst)
    assert machine.link(near, "disk").method in available_kinds()
    assert [both.nbytes for both in machine.both_ways] == [64 << 10, 1 << 20, 4 << 20]
    rows = set(measure_cuda.QUICK_M) if torch.cuda.is_available() else set(measure_kernels.QUICK_M)
    for dtype in ("float32", "bfloat16", *TIMED_WEIGHTS):
        assert {p.m for p in machine.gemm if p.dtype == dtype} == rows
        assert machine.gemm_time_s(machine.best_gemm(dtype, 8, 576, 576), dtype, 8, 576, 576) > 0
    assert machine.tiers.keys() == {"device", "host", "disk"}
    assert machine.folder == str(folder)
    assert 0 <= machine.others_share <= 1 and not machine.guessed


def test_progress_grows_to_one_and_no_file_is_left(measured) -> None:
    _, stages, folder = measured
    fractions = [done for _, done in stages]
    assert fractions == sorted(fractions) and fractions[0] == 0.0 and fractions[-1] == 1.0
    assert list(folder.iterdir()) == []


def test_a_failed_measurement_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[DiskTrial]:
        raise OSError("broken disk")

    monkeypatch.setattr(measure, "disk_trials", fail)
    with pytest.raises(OSError, match="broken disk"):
        measure_machine(tmp_path, quick=True)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(measure.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(OSError, match="there are 1000"):
        measure_machine(tmp_path, quick=True)


def test_near_ties_go_to_the_engine_that_leaves_the_cores_alone() -> None:
    fast, frugal = DiskTrial("uring", 4, 1, 4.0e9, 0.4), DiskTrial("direct", 2, 1, 3.9e9, 0.2)
    slow = DiskTrial("buffered", 1, 1, 2.0e9, 0.1)
    assert choose_trial([slow, fast, frugal]) == frugal
    assert choose_trial([slow, fast]) == fast


@pytest.mark.parametrize("share", [at_length(0.0), at_length(0.25), 0.6])
def test_what_is_measured_is_judged(
    measured, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `believable`, before anybody has it; kernels are timed however much others use the cores."""
    judged: list[Machine] = []
    timed: list[str] = []
    guess = dataclasses.replace(Machine.default(), guessed=("all",))
    for module, name in ((measure_cpu, "links"), (measure_cpu, "gemm_points"), (measure, "attention_points")):
        monkeypatch.setattr(module, name, lambda *_, name=name: timed.append(name) or ())
    monkeypatch.setattr(measure.Neighbours, "share", lambda _: share)
    read, write = (measured[0].link(*ends) for ends in (("disk", "host"), ("host", "disk")))
    found = (read, write, (measured[0].contention, 0.25), (), 4e-5, (7e-5, 2e-5))
    monkeypatch.setattr(measure, "_disk_links", lambda *_: found)
    monkeypatch.setattr(measure, "believable", lambda machine: judged.append(machine) or guess)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert measure_machine(tmp_path, quick=True) is guess
    assert judged[0].links == (read, write) and judged[0].others_share == share
    assert judged[0].reads_core_share == 0.25 and judged[0].copy_issue_s == 7e-5
    assert judged[0].slice_issue_s == 2e-5
    assert timed == ["links", "gemm_points", "attention_points"]


@pytest.mark.parametrize("of", [128 << 20, 512 << 20])
@pytest.mark.parametrize("nbytes", measure.LINK_NBYTES)
def test_reads_that_a_link_is_fitted_to_begin_at_pages(of: int, nbytes: int) -> None:
    """Within the file, and in several places: one that begins elsewhere is copied by the reader, at a quarter of the
    rate."""
    places = [measure._place(turn, nbytes, of) for turn in range(40)]
    assert all(not at % PAGE_NBYTES and at + nbytes <= of for at in places) and len(set(places)) > 1


def test_rows_are_timed_by_the_reader_that_looks_them_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by that of weights, which has fewer in flight."""
    opened, link = [], Link("disk", "device", 1e9, 1e-4, "direct", 2, 4 << 20)
    open_reader = measure.open_reader
    for name, value in (
        ("disk_trials", [measure.DiskTrial("direct", 2, 4 << 20, 1e9, 0.1)]), ("steady_link", (1e9, 1e-4, 1.0)),
        ("issue_times_s", (2e-4, 3e-5)), ("measure_contention", (None, 0.5)), ("measure_writes", (link, ())),
        ("_fill", None), ("read_time_s", 0.0), ("landing_memory", None)):
        monkeypatch.setattr(measure, name, lambda *_, value=value: value)
    monkeypatch.setattr(measure, "open_reader", lambda *how: opened.append(how) or open_reader(*how))
    monkeypatch.setattr(measure, "row_request_s", lambda *_: opened.append("rows") or 3e-5)
    *_, request_s, issue_s = measure._disk_links(tmp_path, CPU, True, lambda *_: None)
    assert (request_s, issue_s) == (3e-5, (2e-4, 3e-5))
    assert opened == [("direct", 2, 4 << 20), readers_beside()[1], "rows"]
