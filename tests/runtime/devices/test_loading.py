"""How a GPU's resident weights are loaded: read and uploaded at once, through pages that several threads touched."""

from __future__ import annotations

import contextlib
import ctypes
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forebay.rewriter.ir.program import DISK, Copy, FileSlice, Span
from forebay.runtime.devices.cuda import device as cuda
from forebay.runtime.devices.cuda import pinned
from forebay.runtime.disk.reader import Read
from forebay.runtime.run.arena import Arena

HALF = 4096
CONTENTS = bytes(os.urandom(6 * HALF))


class Stream:
    """Does copies when it is waited for, as late as a GPU may."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.late = log, list[Any]()

    def synchronize(self) -> None:
        for copy in self.late:
            copy()
        self.late.clear()


class Reader:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def submit(self, read: Read) -> None:
        self.log.append(f"read {read.offset}")
        ctypes.memmove(read.address, CONTENTS[read.offset : read.offset + read.nbytes], read.nbytes)
        read.on_done(None)

    def fault(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    log: list[str] = []

    class Event:
        def record(self, stream: Stream) -> None:
            self.stream = stream

        def synchronize(self) -> None:
            self.stream.synchronize()

    for name, value in (("is_available", lambda: True), ("Event", Event), ("Stream", lambda priority=0: Stream(log)),
                        ("stream", lambda stream: contextlib.nullcontext()),
                        ("cudart", lambda: SimpleNamespace(cudaHostUnregister=lambda address: 0))):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda, "IDLE", [])
    monkeypatch.setattr(cuda, "LOAD_NBYTES", 2 * HALF)
    made = cuda.CudaDevice(Reader(log))  # type: ignore[arg-type]
    made.landing = Arena(2 * HALF)
    made.device_memory = torch.zeros(8 * HALF, dtype=torch.uint8)
    real = made._bytes

    class Target:
        """Device memory that a copy arrives in only when its stream is waited for."""

        def __init__(self, span: Span, lower: int = 0, upper: int | None = None) -> None:
            self.span, self.memory, self.offset = span, real(span)[lower:upper], span.offset + lower

        def __getitem__(self, part: slice) -> Target:
            return Target(self.span, part.start, part.stop)

        def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
            assert non_blocking
            log.append(f"upload {self.offset}")
            made.streams[cuda.UPLOAD].late.append(lambda: self.memory.copy_(source))  # type: ignore[attr-defined]

    made._bytes = Target  # type: ignore[assignment, method-assign]
    made.log = log  # type: ignore[attr-defined]
    yield made
    made.close()


def load(device: Any, start: int, nbytes: int) -> bytes:
    call = device.bind(Copy(DISK, FileSlice("weights", start, nbytes), Span("device", 0, nbytes, "w"), "load w"), None)
    call()
    return bytes(device.device_memory[:nbytes].numpy())


@pytest.mark.parametrize("nbytes", [0, 1, HALF - 1, HALF, HALF + 1, 2 * HALF, 5 * HALF + 7])
def test_every_byte_arrives(device: Any, nbytes: int) -> None:
    assert load(device, 13, nbytes) == CONTENTS[13 : 13 + nbytes]


def test_a_piece_is_read_before_the_one_before_it_is_uploaded(device: Any) -> None:
    load(device, 0, 3 * HALF)
    assert device.log == ["read 0", f"read {HALF}", "upload 0", f"read {2 * HALF}", f"upload {HALF}",
                          f"upload {2 * HALF}"]


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 64 << 10, 8 << 20])
def test_pages_are_touched_once_each_by_several_threads(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    touched: list[tuple[int, int]] = []
    monkeypatch.setattr(ctypes, "memset", lambda at, value, n: touched.append((at, n)))
    pinned._touch(1 << 20, nbytes)
    ends = [1 << 20, *(at + n for at, n in sorted(touched))]
    assert [at for at, _ in sorted(touched)] == ends[:-1] and ends[-1] == (1 << 20) + nbytes
    assert len(touched) == min(pinned.TOUCH_THREADS, -(-nbytes // 4096))
