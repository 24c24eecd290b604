"""Measuring leaves a complete, valid profile and nothing else; the kept profile is used while it is true."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from forebay.rewriter.machine.profile import Machine, load_machine, machine_from_json
from forebay.runtime.disk.reader import available_kinds
from forebay.runtime.measure import cuda as measure_cuda
from forebay.runtime.measure import machine as measure
from forebay.runtime.measure.machine import DiskTrial, cached_machine, choose_trial, machine_cache_path, measure_machine


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Machine, list[tuple[str, float]], Path]:
    folder = tmp_path_factory.mktemp("disk")
    stages: list[tuple[str, float]] = []
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
    rows = set(measure_cuda.QUICK_M) if torch.cuda.is_available() else {1, 2, 4, 8, 16, 32, 64, 256}
    for dtype in ("float32", "bfloat16", "w4g64", "w8g128"):
        assert {p.m for p in machine.gemm if p.dtype == dtype} == rows
        assert machine.gemm_time_s(machine.best_gemm(dtype, 8, 576, 576), dtype, 8, 576, 576) > 0
    assert machine.tiers.keys() == {"device", "host", "disk"}
    assert machine.folder == str(folder)


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


def test_the_kept_profile_is_used_while_it_is_true(measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, _, folder = measured
    calls: list[bool] = []

    def fake(_: object, *, quick: bool) -> Machine:
        calls.append(quick)
        return machine

    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "measure_machine", fake)
    assert machine_cache_path() == tmp_path / "cache" / "machine.json"
    assert cached_machine(folder) == machine and calls == [True]
    assert cached_machine(folder) == machine and calls == [True], "the second time it is read, not measured"
    stale = dataclasses.replace(machine, cores=machine.cores + 1)
    machine_cache_path().write_text(stale.to_json())
    assert cached_machine(folder) == machine and calls == [True, True]
    assert load_machine(machine_cache_path()) == machine, "the new profile replaces the stale one"
    machine_cache_path().write_text("{")
    cached_machine(folder)
    monkeypatch.setattr(measure, "_versions", lambda: {"torch": "other"})
    cached_machine(folder)
    assert calls == [True] * 4
