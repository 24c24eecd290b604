"""The CUDA device's ordering and its errors, with stand-ins for streams and events: no GPU is needed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from forebay.kernels.gpu_support.scratch import scratch_of
from forebay.rewriter.ir.program import (
    COMPUTE,
    DISK,
    SCRATCH,
    UPLOAD,
    Copy,
    FileSlice,
    Launch,
    Program,
    Record,
    Release,
    Rows,
    Span,
    TensorRef,
    Wait,
)
from forebay.runtime.devices.cuda.device import CudaDevice
from forebay.runtime.devices.cuda.events import DeviceEvent
from forebay.runtime.devices.streams import Ticket
from forebay.runtime.run.arena import Arena
from forebay.runtime.run.executor import BoundProgram
from forebay.runtime.run.trace import Trace


class Stream:
    def __init__(self, name: str, log: list[str], priority: int = 0) -> None:
        self.name, self.log, self.priority = name, log, priority

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...


class Event:
    def record(self, stream: Stream) -> None:
        if stream.name == "stream 1":  # uploads
            raise RuntimeError("an illegal memory access was encountered")

    def synchronize(self) -> None: ...


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the stand-ins were told."""
    told: list[str] = []
    made: list[Stream] = []
    current = threading.local()

    def new(priority: int = 0) -> Stream:
        made.append(Stream(f"stream {len(made)}", told, priority))
        return made[-1]

    @contextlib.contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        before, current.stream = current_stream(), stream
        yield
        current.stream = before

    def current_stream() -> Stream:
        return getattr(current, "stream", None) or Stream(threading.current_thread().name, told)

    for name, value in (("is_available", lambda: True), ("Event", Event), ("Stream", new), ("stream", entered),
                        ("current_stream", current_stream),
                        ("set_stream", lambda stream: setattr(current, "stream", stream))):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("forebay.runtime.devices.cuda.device.IDLE", [])
    return told


class Reader:
    def submit(self, read: object) -> None:
        raise RuntimeError("this disk reader is closed")

    def fault(self) -> None: ...

    def close(self) -> None: ...


def test_kernels_go_to_the_compute_stream_of_whichever_thread_calls(log: list[str]) -> None:
    """Behind what the caller's stream holds, and the caller's stream goes on behind them."""
    device = CudaDevice(Reader())  # type: ignore[arg-type]

    def step() -> None:
        with device.issuing():
            log.append(f"kernel on {torch.cuda.current_stream().name}")  # type: ignore[attr-defined]
        log.append(f"then {torch.cuda.current_stream().name}")  # type: ignore[attr-defined]

    for name in ("main", "other"):
        thread = threading.Thread(target=step, name=name)
        thread.start()
        thread.join()
    assert log == [line for name in ("main", "other") for line in (
        f"stream 0 waits for {name}", "kernel on stream 0", f"{name} waits for stream 0", f"then {name}")]
    device.close()


def test_streams_are_those_of_a_device_that_was_closed(log: list[str]) -> None:
    """torch keeps memory for every stream that ever multiplied, so each new one would cost it; two devices in use share
    none, and what is poisoned is so before anything that is issued after."""
    first, second = (CudaDevice(Reader()) for _ in range(2))  # type: ignore[arg-type]
    streams = [{device.compute, *device.streams.values()} for device in (first, second)]
    assert len(streams[0]) == len(streams[1]) == 1 + len(first.streams) and not streams[0] & streams[1]
    assert first.compute.priority == 0 and all(stream.priority < 0 for stream in first.streams.values())
    second.close()
    third = CudaDevice(Reader(), poison=True)  # type: ignore[arg-type]
    assert third.compute is second.compute and {third.compute, *third.streams.values()} == streams[1]
    third.device_memory = torch.zeros(8, dtype=torch.uint8)
    waited: list[int] = []
    third.finish = lambda: waited.append(int(third.device_memory[4]))  # type: ignore
    release = third.bind(Release(COMPUTE, Span("device", 4, 2, "x")), None)
    assert release is not None
    release()
    assert waited == [255] and third.device_memory.tolist() == [0, 0, 0, 0, 255, 255, 0, 0]
    del third.finish
    for device in (third, first):
        device.close()


@pytest.mark.parametrize("waits", [COMPUTE, DISK])
def test_an_upload_whose_event_cannot_be_recorded_is_told_to_who_waits(log: list[str], waits: str) -> None:
    device = CudaDevice(Reader())  # type: ignore[arg-type]
    device._record(Record(UPLOAD, 1))
    seen: list[str] = []

    def run() -> None:
        try:
            device._wait(Wait(waits, 1))
            device.finish()
        except RuntimeError as error:
            seen.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert seen == ["an illegal memory access was encountered"]
    device.close()


def test_a_read_that_cannot_be_issued_is_told(log: list[str]) -> None:
    device = CudaDevice(Reader())  # type: ignore[arg-type]
    device.host = SimpleNamespace(address=4096)  # type: ignore[assignment]
    copy = Copy(DISK, FileSlice("weights", 0, 64), Span("host", 0, 64, "host_slot0"), "fetch w")
    call = device.bind(copy, None)
    assert call is not None
    call()
    device._record(Record(DISK, 1))
    with pytest.raises(RuntimeError, match="closed"):
        device._wait(Wait(COMPUTE, 1))
    with pytest.raises(RuntimeError, match="closed"):
        device.finish()
    device.host = None
    device.close()


class Handed(CudaDevice):
    """Notes which thread issues what."""

    def __init__(self, log: list[str], trace: Trace | None = None) -> None:
        super().__init__(Reader(), trace=trace)  # type: ignore[arg-type]
        self.device_memory, self.host = torch.zeros(64, dtype=torch.uint8), Arena(64)
        self.host.bytes[:] = torch.arange(64, dtype=torch.uint8)
        worker = self.workers[UPLOAD]
        submit = worker.submit
        worker.submit = lambda call: (log.append("handed over"), submit(call))[1]  # type: ignore

    def copy(self, at: int) -> None:
        call = self.bind(Copy(UPLOAD, Span("host", at, 4, "slot"), Span("device", at, 4, "w"), "fetch w"), None)
        assert call is not None
        call()


def test_who_calls_issues_what_waits_for_nothing(log: list[str]) -> None:
    """Copies, records and waits of a stream of copies: in order, on its stream, by the caller within `issuing`."""
    device = Handed(log)
    with device.issuing():
        device._record(Record(COMPUTE, 1))
        device._wait(Wait(UPLOAD, 1))
        device.copy(8)
        assert torch.cuda.current_stream() is device.compute
        with pytest.raises(RuntimeError, match="illegal memory access"):  # at once, and to the caller
            device._record(Record(UPLOAD, 2))
    assert "handed over" not in log and device.device_memory.tolist()[8:12] == [8, 9, 10, 11]
    assert torch.cuda.current_stream() is not device.compute
    device.copy(0)  # nobody's step
    assert log.count("handed over") == 1
    device.workers[UPLOAD].wait_idle()
    assert device.device_memory.tolist()[:4] == [0, 1, 2, 3]
    device.host = None
    device.close()


@pytest.mark.parametrize("behind", ["an event that is not issued yet", "an error", "a trace"])
def test_what_must_wait_is_handed_over_and_all_behind_it(log: list[str], behind: str) -> None:
    device = Handed(log, Trace() if behind == "a trace" else None)
    worker, gate = device.workers[UPLOAD], Ticket()
    if behind == "an error":
        worker.submit(lambda: {}["lost"])
        with pytest.raises(KeyError):
            worker.wait_idle()
    log.clear()
    with device.issuing():
        if behind == "an event that is not issued yet":
            device.events[7] = DeviceEvent(gate)
            device._wait(Wait(UPLOAD, 7))
        device.copy(4)
        device.copy(8)
        assert log.count("handed over") == 2 + (behind == "an event that is not issued yet")
        if behind == "an event that is not issued yet":
            assert not any(device.device_memory)
        gate.done()
        with contextlib.suppress(KeyError):
            worker.wait_idle()
    assert device.device_memory.tolist()[4:12] == [*range(4, 12)]
    if behind == "an event that is not issued yet":
        while not worker.idle:
            pass
        log.clear()
        with device.issuing():
            device.copy(12)
        assert "handed over" not in log and device.device_memory.tolist()[12:16] == [*range(12, 16)]
    device.host = None
    device.close()


def test_an_event_is_recorded_anew_once_nobody_is_to_wait_for_it(log: list[str]) -> None:
    """A wait that a worker has not issued yet must find what was recorded before it, and nothing later."""
    device = Handed(log)
    gate, seen = threading.Event(), list[object]()
    stream = device.streams[UPLOAD]
    stream.wait_event = seen.append  # type: ignore
    with device.issuing():
        device._record(Record(COMPUTE, 3))
        event, first = device.events[3], device.events[3].cuda
        device._wait(Wait(UPLOAD, 3))
        device._record(Record(COMPUTE, 3))
        assert device.events[3] is event and event.cuda is first is not None and seen == [first]
        device.workers[UPLOAD].submit(gate.wait)
        device._wait(Wait(UPLOAD, 3))
        device._record(Record(COMPUTE, 3))
        second = device.events[3].cuda
        assert second is not first and seen == [first]
        gate.set()
        device.workers[UPLOAD].wait_idle()
        assert seen == [first, first]
        device._record(Record(COMPUTE, 3))
        assert device.events[3].cuda is second
    device.host = None
    device.close()


def test_rows_are_named_by_what_was_told_until_something_else_lies_there(log: list[str]) -> None:
    """Then whoever hands them over asks the device; a table that a step computes is read there always."""
    device = Handed(log)
    index, whole = (TensorRef("device", at, "int64", shape, (2, 1)[-len(shape) :], "loads")
                    for at, shape in ((32, (2,)), (16, (2, 2))))
    other = TensorRef("device", 40, "int64", (1,), (1,), "more")
    table = torch.zeros(2, 2, dtype=torch.int64)
    load = Copy(UPLOAD, Rows(Span("host", 0, 32, "cache"), 4, index, skips=True), Span("device", 0, 8, "slot"), "load")
    call = device.bind(load, None)
    assert call is not None

    def loaded(*rows: int, told: bool = True) -> list[int]:
        table[1] = torch.tensor(rows)
        device.tensor(whole).copy_(table if told else torch.tensor([6, 7]))
        if told:
            device.tell(whole, table)
        log.clear()
        with device.issuing():
            call()
            by_who = log.count("handed over")
            device.workers[UPLOAD].wait_idle()
        handed.append(by_who)
        return device.device_memory[:8].tolist()

    handed: list[int] = []
    device.tell(index, torch.tensor([0, 0]))
    assert loaded(1, 3) == [4, 5, 6, 7, 12, 13, 14, 15]
    assert loaded(5, -1) == [20, 21, 22, 23, 12, 13, 14, 15] and loaded(2, told=False)[:4] == [20, 21, 22, 23]
    device.tell(other, torch.tensor([0]))
    assert loaded(0, told=False) == [24, 25, 26, 27, 28, 29, 30, 31]
    assert loaded(4) == [16, 17, 18, 19, 16, 17, 18, 19], "one number for all rows"
    device.tell(replace(index, buffer="reused"), torch.tensor([0, 0]))
    assert loaded(0, told=False) == [24, 25, 26, 27, 28, 29, 30, 31], "another buffer is no part of it"
    assert handed == [0, 0, 0, 1, 0, 1]
    with pytest.raises(RuntimeError, match="row 9"):
        loaded(9, 9)
    device.host = None
    device.close()


def test_a_trace_counts_the_experts_that_are_fetched(log: list[str]) -> None:
    pytest.importorskip("triton")
    trace = Trace()
    device = Handed(log, trace)
    assert device.device_memory is not None and device.host is not None
    index = device.tensor(TensorRef("device", 32, "int64", (3,), (1,), "told"))
    named = Rows(Span("host", 0, 32, "table"), 4, TensorRef("device", 32, "int64", (3,), (1,), "told"), keeps=True)
    call = device.bind(Copy(UPLOAD, named, Span("device", 0, 12, "pool"), "fetch experts"), None)
    assert call is not None
    for rows in ((5, -1, 2), (-1, -1, -1), (-1, 0, -1)):
        index.copy_(torch.tensor(rows))
        with device.issuing():
            call()
            device.workers[UPLOAD].wait_idle()
    assert device.device_memory[:12].tolist() == [*range(20, 24), *range(4), *range(8, 12)]
    assert [nbytes for _, _, _, nbytes in trace._kept()] == [8, 0, 4]
    device.host = None
    device.close()


def test_scratch_is_taken_at_once_on_the_compute_stream_and_given_back(log: list[str]) -> None:
    device = CudaDevice(Reader(), graphs=False)  # type: ignore[arg-type]
    device.device_memory = torch.zeros(64, dtype=torch.uint8)
    device.compute.cuda_stream = 77  # type: ignore[misc]
    launch = Launch("compute", "copy", (), {}, (), (), (), "y", held=((SCRATCH, 5000), ("cuBLAS", 7)))
    less = Launch("compute", "copy", (), {}, (), (), (), "z", held=((SCRATCH, 300),))
    program = Program("step", (), (), {}, {})
    assert BoundProgram(program, device) is not None and device.scratch is None
    device.hold(Program("step", (less, launch), (), {}, {}).held_nbytes())
    taken = scratch_of(torch.device("cpu"), 77)
    assert taken is device.scratch and taken.values.numel() == 5000
    device.hold(Program("step", (less,), (), {}, {}).held_nbytes())
    assert taken.values.numel() == 5000
    device.close()
    del taken
    assert scratch_of(torch.device("cpu"), 77).values.numel() == 0
