"""Inputs and results on their way through pinned memory; stand-ins for events say what was waited for."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forebay.runtime.devices.cuda import pinned
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.run.arena import Arena


class Event:
    made: list[Event] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.recorded = self.waited = 0
        self.made.append(self)

    def record(self, stream: object) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        self.waited += 1


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> pinned.InputStaging:
    Event.made = []
    driver = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    for name, value in (("cudart", lambda: driver), ("Event", Event), ("current_stream", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, value)
    return pinned.InputStaging(256)


def test_memory_of_a_turn_is_written_anew_once_its_copies_have_ended(staging: pinned.InputStaging) -> None:
    target = torch.zeros(3, dtype=torch.int64)
    for step in range(pinned.STAGED_STEPS + 2):
        value = torch.tensor([step, 7, 8])
        staging.write([(target, value)])
        assert target.tolist() == value.tolist()
    assert [event.recorded for event in Event.made] == [2, 2, 1, 1]
    assert [event.waited for event in Event.made] == [1, 1, 0, 0]
    kept = staging.memory.bytes.view(torch.int64)[:: 256 // 8].tolist()
    assert kept == [4, 5, 2, 3], "each step has memory of its own"


def test_inputs_of_all_kinds_reach_their_targets(staging: pinned.InputStaging) -> None:
    """Other dtypes and shapes, a value of one element for all, one that fills the room, and one that it cannot hold."""
    given = [(torch.zeros(2, 3), torch.tensor(1.5)), (torch.zeros(5, dtype=torch.int32), torch.arange(5)),
             (torch.zeros(2, 2).t(), torch.tensor([[1.0, 2.0], [3.0, 4.0]])), (torch.zeros(100), torch.ones(100)),
             (torch.zeros(16, dtype=torch.uint8), torch.full((16,), 9, dtype=torch.uint8)),
             (torch.zeros(0), torch.ones(0))]
    staging.write(given)
    for target, value in given:
        assert torch.equal(target, value.expand(target.shape).to(target.dtype))


def test_a_result_of_the_host_is_as_it_was(staging: pinned.InputStaging) -> None:
    result = torch.tensor([4, 5])
    read = pinned.read_later(result)
    result.fill_(0)
    assert read().tolist() == [4, 5]
    staging.close()


class Shown:
    """`cudaHostGetDevicePointer` of a driver that maps host memory `shift` bytes further on, or fails."""

    def __init__(self, code: int, shift: int = 0) -> None:
        self.code, self.shift = code, shift

    def __call__(self, found: Any, host: ctypes.c_void_p, flags: int) -> int:
        found._obj.value = (host.value or 0) + self.shift
        return self.code


def test_kernels_see_pinned_memory_at_the_address_that_the_driver_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    described = []

    def as_tensor(value: Any, device: str) -> torch.Tensor:
        described.append((value.__cuda_array_interface__, device))
        return value.arena.bytes

    arena = Arena(4096)
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    monkeypatch.setattr(pinned, "driver_function", lambda *names: Shown(0, 8192))
    assert pinned.seen_by_gpu(arena) is arena.bytes
    assert described == [({"shape": (4096,), "typestr": "|u1", "data": (arena.address + 8192, False), "version": 2},
                          "cuda")]
    monkeypatch.setattr(pinned, "driver_function", lambda *names: Shown(801))
    with pytest.raises(RuntimeFault, match=r"cannot read host memory in place \(error 801"):
        pinned.seen_by_gpu(arena)
    monkeypatch.undo()
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeFault, match="cannot read host memory in place: this torch is for no GPU"):
            pinned.seen_by_gpu(arena)
