"""What is timed reads memory that no cache holds: all of it lies between two uses of a part, whoever takes turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forebay.kernels.build import process_limits
from forebay.kernels.operator import HOST_KERNELS
from forebay.kernels.operators import RMS_NORM
from forebay.runtime.devices.cpu import measure as measure_cpu
from forebay.runtime.measure import kernels
from forebay.runtime.measure.kernels import ColdCalls
from forebay.runtime.run.arena import Arena


def recorded(parts: torch.Tensor, used: list[tuple[int, int]]) -> ColdCalls:
    """Calls that note the bytes from..to of `parts` that they are over."""

    def bind(part: torch.Tensor) -> Callable[[], object]:
        at = part.storage_offset() * part.element_size()
        return lambda: used.append((at, at + part.nbytes))

    return ColdCalls(bind, parts)


def test_calls_of_two_sizes_go_through_the_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ColdCalls, "reached", 0)
    memory, used = torch.zeros(64, dtype=torch.uint8), list[tuple[int, int]]()
    large, small = recorded(memory.view(4, 16), used), recorded(memory.view(16, 4), used)
    for _ in range(6):
        next(large)()
        next(small)()
        next(small)()
    for i, (begin, end) in enumerate(used):
        read = 0
        for other, to in used[i + 1 :]:
            if other < end and begin < to:
                assert read >= memory.nbytes - 2 * 16, "it was read again before nearly all of the memory was"
                break
            read += to - other
    assert {begin for begin, _ in used} == {0, 16, 20, 32, 48, 52}, "parts lie at multiples of their size"


def test_what_is_bound_is_kept_for_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ColdCalls, "reached", 0)
    bound: list[int] = []
    calls = ColdCalls(lambda part: bound.append(1) or (lambda: None), torch.zeros(3, 8))
    for _ in range(7):
        next(calls)()
    assert len(bound) == 3


@pytest.mark.parametrize(("cache_kib", "free", "expected"), [
    (0, 1 << 40, 64 << 20), (1 << 10, 1 << 40, 64 << 20), (160 << 10, 1 << 40, 200 << 20),
    (480 << 10, 1 << 30, 128 << 20),
])
def test_cold_memory_is_larger_than_the_caches_where_there_is_room(
    cache_kib: int, free: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for level, size in enumerate((32, cache_kib) if cache_kib else ()):
        (tmp_path / f"index{level}").mkdir()
        (tmp_path / f"index{level}" / "size").write_text(f"{size}K\n")
    made: list[int] = []
    monkeypatch.setattr(process_limits, "CACHES", tmp_path)
    monkeypatch.setattr(kernels, "available_nbytes", lambda: free)
    monkeypatch.setattr(kernels, "Arena", lambda nbytes: made.append(nbytes) or Empty())
    kernels.cold_memory.__wrapped__()
    assert made == [expected]


def test_reads_are_timed_over_a_memory_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit on memory gives sizes that pieces of 8 MiB do not divide."""
    memory = Arena(19 << 20)
    memory.bytes.fill_(0)
    monkeypatch.setattr(kernels, "cold_memory", lambda: memory)
    assert measure_cpu.read_bytes_per_s(1) > 0


class Empty:
    bytes = torch.zeros(0, dtype=torch.uint8)


def test_a_launch_is_timed_by_a_kernel_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    monkeypatch.setitem(RMS_NORM.bind, HOST_KERNELS, lambda use: lambda: launched.append(use.args[0].numel()))
    monkeypatch.setattr(measure_cpu, "cold_products", lambda *_: iter(lambda: (lambda: None), None))
    assert measure_cpu.dispatch_s(2) > 0
    assert launched == [8] * 2 * measure_cpu.DISPATCHES
    assert 0 < measure_cpu.torch_dispatch_s(2) < 1e-3
