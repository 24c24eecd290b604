"""Equal runs as one copy of a GPU's driver, which memory of the processor stands in for."""

from __future__ import annotations

import ctypes
import random
from types import SimpleNamespace

import pytest
import torch

from forebay.runtime.devices.cuda import pitched
from forebay.runtime.devices.cuda.pitched import PitchedRuns, RunCopier, grouped
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.devices.outward import copy_runs

STREAM = SimpleNamespace(cuda_stream=7, synchronize=lambda: None)


class Driver:
    """Copies rows as a GPU's driver does, and counts its calls."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.calls = code, 0

    def __call__(
        self, target: int, target_pitch: int, source: int, source_pitch: int, nbytes: int, count: int, kind: int,
        stream: int,
    ) -> int:
        assert nbytes <= min(target_pitch, source_pitch) and (kind, stream) == (4, 7)
        for row in range(count):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, nbytes)
        self.calls += 1
        return self.code


def test_equal_runs_at_equal_steps_are_one() -> None:
    runs = tuple((8 * i, 32 * i, 8) for i in range(5))
    assert grouped(runs) == [PitchedRuns(0, 0, 8, 5, 8, 32)]
    assert grouped(((0, 0, 8), (8, 8, 4), (12, 12, 4), (64, 24, 4))) == [
        PitchedRuns(0, 0, 8), PitchedRuns(8, 8, 4, 2, 4, 4), PitchedRuns(64, 24, 4)]
    backward, overlapping = ((8, 0, 8), (0, 8, 8)), ((0, 0, 8), (4, 8, 8))
    assert [len(grouped(each)) for each in (backward, overlapping, ((0, 0, 8), (1 << 31, 8, 8)), ())] == [2, 2, 2, 0]


@pytest.mark.parametrize("seed", range(12))
def test_what_is_joined_moves_the_same_bytes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: STREAM)
    chance = random.Random(seed)
    width, heads = chance.choice((1, 3, 16)), 6
    rows = sorted(chance.sample(range(40), heads)) if seed % 2 else range(0, 4 * heads, 4)
    moved = tuple((width * row, (width + seed) * i, width) for i, row in enumerate(rows))
    source = torch.randint(0, 256, (640,), dtype=torch.uint8)
    driver = Driver()
    results = []
    for copy in (None, pitched._checked_errors(driver)):
        target = torch.zeros(256, dtype=torch.uint8)
        copier = RunCopier(source, target, copy)
        copier(moved)
        copier(moved)
        results.append(target)
    expected = torch.zeros(256, dtype=torch.uint8)
    copy_runs(moved, source, expected)
    assert all(torch.equal(result, expected) for result in results) and bool(expected.any())
    assert driver.calls == 2 * sum(group.rows > 1 for group in grouped(moved))
    assert seed % 2 or driver.calls == 2, "rows at equal distances are one copy"


def test_other_runs_are_joined_anew_and_stay_within_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: STREAM)
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    copier = RunCopier(source, target, pitched._checked_errors(Driver()))
    copier(((0, 0, 4), (8, 4, 4)))
    copier(((32, 0, 4), (40, 4, 4)))
    assert target[:8].tolist() == [32, 33, 34, 35, 40, 41, 42, 43]
    for beyond in (((0, 0, 4), (61, 4, 4)), ((0, 0, 4), (4, 61, 4))):
        with pytest.raises(RuntimeFault, match="leaves memory of 64 bytes"):
            copier(beyond)
    assert target[8:].count_nonzero() == 0


@pytest.mark.parametrize("fault", ("", "an error", "other pitches", "nothing"))
def test_a_driver_is_used_where_it_moved_the_right_bytes(fault: str) -> None:
    driver = Driver(code=1 if fault == "an error" else 0)
    copy = pitched._checked_errors(driver)

    def told(target: int, target_pitch: int, source: int, source_pitch: int, *rest: int) -> None:
        if fault == "other pitches":
            target_pitch, source_pitch = source_pitch, target_pitch
        if fault != "nothing":
            copy(target, target_pitch, source, source_pitch, *rest)  # type: ignore[call-arg]

    tensors = [torch.zeros(256, dtype=torch.uint8)[:64] for _ in range(3)]
    if not fault:
        pitched._refuse_other_bytes(told, *tensors, STREAM)  # type: ignore[arg-type]
        return
    with pytest.raises(RuntimeFault, match="error 1" if fault == "an error" else "other bytes"):
        pitched._refuse_other_bytes(told, *tensors, STREAM)  # type: ignore[arg-type]


def test_without_a_gpu_runs_go_one_by_one() -> None:
    if not torch.cuda.is_available():
        assert pitched.pitched_copy() is None
