"""The thread device: reads land before they are used, errors come out, poison and sync change nothing but time."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tiny import Tiny, aten, bytes_at, chain, issue, lowered, placements, plan_for, planned, run_program, tiny

from forebay.rewriter.ir.plan import Budget, Plan
from forebay.rewriter.ir.program import (
    COMPUTE,
    DISK,
    UPLOAD,
    Copy,
    FileSlice,
    Program,
    Record,
    Release,
    Span,
    TensorRef,
    Wait,
)
from forebay.rewriter.planning.options import Options
from forebay.runtime.devices.cpu.device import ThreadDevice
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.disk.open_file import TruncatedFileError
from forebay.runtime.disk.reader import OnDone, Read, available_kinds, open_reader
from forebay.runtime.run.executor import BoundProgram


class SlowReader:
    """Reads arrive late and out of order: every one on a thread of its own, in random order of a few at a time."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.threads: list[threading.Thread] = []
        self.delays = threading.Event()

    def prepare(self, read: Read) -> Callable[[], None]:
        return lambda: self.submit(read)

    def submit(self, read: Read) -> None:
        delay = self.chance.choice([0.0, 0.002, 0.006])

        def run() -> None:
            self.delays.wait(delay)
            with open(read.path, "rb") as file:
                file.seek(read.offset)
                data = bytearray(file.read(read.nbytes))
            target = (bytes_at(read.address - read.room_before, read.nbytes + read.room_before + read.room_after))
            target.fill_(0x55)  # what a direct read may leave around its destination
            target[read.room_before : read.room_before + read.nbytes] = torch.frombuffer(data, dtype=torch.uint8)
            read.on_done(None)

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def read_rows(
        self, path: str, offset: int, row_nbytes: int, rows: Sequence[int], address: int, done: OnDone
    ) -> None:
        left = len(rows)
        lock = threading.Lock()

        def one(error: BaseException | None) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                done(error)

        for i, row in enumerate(rows):
            self.submit(Read(path, offset + row * row_nbytes, row_nbytes, address + i * row_nbytes, 0, 0, one))

    def fault(self) -> None:
        pass

    def close(self) -> None:
        for thread in self.threads:
            thread.join()


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_slow_reads_that_overtake_each_other(tmp_path: Path, slots: int, seed: int) -> None:
    """Three layers in tiles, so that 3 times 4 copies meet every slot; results must not depend on when reads land."""
    model = chain(tmp_path, width=64)
    plan, program = planned(model, Budget(slots * 8192 + 8_000), Options(slots=slots, slot_nbytes=4096))
    assert plan.schedule.slots == slots and plan.prediction.streamed_nbytes > 40_000
    got = run_program(program, plan, model, steps=3, reader=SlowReader(seed), poison=bool(seed % 2))[0]  # type: ignore[arg-type]
    torch.testing.assert_close(got, model.expected()[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", available_kinds())
def test_every_kind_of_reader_gives_the_same(tmp_path: Path, kind: str) -> None:
    model = chain(tmp_path, width=64)
    plan, program = planned(model, Budget(24_000))
    got = run_program(program, plan, model, steps=3, reader=open_reader(kind))[0]
    torch.testing.assert_close(got, model.expected()[0], rtol=1e-5, atol=1e-5)


def device(**options: bool) -> ThreadDevice:
    found = ThreadDevice(open_reader("buffered"), **options)
    found.allocate({"device": 8192, "host": 8192})
    return found


def bytes_of(target: ThreadDevice, span: Span) -> torch.Tensor:
    return target.tensor(TensorRef(span.arena, span.offset, "uint8", (span.nbytes,), (1,), span.buffer))


def test_a_wait_on_either_stream_sees_the_copy_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 16)
    host, end = Span("host", 64, 4000, "h"), Span("device", 128, 4000, "d")
    with_hop = device()
    for _ in range(20):
        bytes_of(with_hop, end).zero_()
        issue(with_hop, Copy(DISK, FileSlice(str(path), 3, 4000), host, "down"), Record(DISK, 1), Wait(UPLOAD, 1),
            Copy(UPLOAD, host, end, "up"), Record(UPLOAD, 2), Wait(COMPUTE, 2))
        assert bytes_of(with_hop, end).tolist() == list((bytes(range(256)) * 16)[3:4003])
    with_hop.close()


def test_poison_is_nan_in_every_float_format_and_out_of_range_in_every_integer_one() -> None:
    poisoned = device(poison=True)
    span = Span("device", 0, 64, "b")
    issue(poisoned, Release(COMPUTE, span))
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        assert poisoned.tensor(TensorRef("device", 0, dtype, (8,), (1,), "b")).isnan().all()
    assert (poisoned.tensor(TensorRef("device", 0, "int64", (8,), (1,), "b")) < 0).all()
    poisoned.close()
    calm = device()
    assert calm.bind(Release(COMPUTE, span), None) is None
    calm.close()


def test_poison_on_the_upload_stream_waits_its_turn(tmp_path: Path) -> None:
    """A host slot is freed behind the copy out of it, not when the free is issued."""
    poisoned = device(poison=True)
    gate = threading.Event()
    host, end = Span("host", 0, 64, "h"), Span("device", 0, 64, "d")
    bytes_of(poisoned, host).fill_(7)
    poisoned._worker(UPLOAD).submit(gate.wait)
    issue(poisoned, Copy(UPLOAD, host, end, "up"), Release(UPLOAD, host))
    gate.set()
    poisoned.finish()
    assert (bytes_of(poisoned, end) == 7).all()
    assert (bytes_of(poisoned, host) == 0xFF).all()
    poisoned.close()


def test_what_is_read_after_its_release_is_poison_in_the_result(tmp_path: Path) -> None:
    """A Program that the verifier would refuse: poison makes its fault visible."""
    model = chain(tmp_path, layers=1)
    plan = plan_for(placements(model, {}))
    program = lowered(model, plan)
    last = next(i for i in reversed(range(len(program.step))) if not isinstance(program.step[i], Release))
    b = next(b for b in plan.buffers if b.name == "w0")
    early = Release(COMPUTE, Span("device", b.offset, b.nbytes, "w0"))
    broken = Program(program.name, (early, *program.step[: last + 1]), (), program.arenas, program.resident,
                     program.inputs, program.outputs)
    assert run_program(broken, plan, model, steps=1, poison=True)[0].isnan().any()
    assert not run_program(broken, plan, model, steps=1)[0].isnan().any()


def test_sync_finishes_every_copy_before_the_next_item(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\x05" * 4096)
    one_by_one = device(sync=True)
    host, end = Span("host", 0, 4096, "h"), Span("device", 0, 4096, "d")
    issue(one_by_one, Copy(DISK, FileSlice(str(path), 0, 4096), host, "down"))
    assert (bytes_of(one_by_one, host) == 5).all()
    issue(one_by_one, Copy(UPLOAD, host, end, "up"))
    assert (bytes_of(one_by_one, end) == 5).all()
    one_by_one.close()


def streaming(model: Tiny) -> tuple[Plan, Program]:
    plan = plan_for(placements(model, {n: 0 for n in model.weights if n[0] == "w"}))
    return plan, lowered(model, plan, hoist=False)


def test_a_truncated_file_comes_out_of_the_step_that_needs_it(tmp_path: Path) -> None:
    model = chain(tmp_path)
    plan, program = streaming(model)
    os.truncate(model.files["w2"].path, model.files["w2"].offset + 100)
    with pytest.raises(TruncatedFileError, match=r"weights\.bin"):
        run_program(program, plan, model)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    model = chain(tmp_path)
    plan, program = streaming(model)
    Path(model.files["w0"].path).unlink()
    with pytest.raises(FileNotFoundError, match=r"weights\.bin"):
        run_program(program, plan, model)


def test_a_row_that_the_table_lacks_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    def build(graph, nodes):  # type: ignore[no-untyped-def]
        return (graph.call_function(aten.embedding.default, (nodes["table"], nodes["ids"])),)

    for bad in (9, -1):
        model = tiny(tmp_path, build, {"ids": torch.tensor([0, bad])}, {"table": torch.randn(9, 8)})
        plan = plan_for(placements(model, {"table": "gather"}))
        program = lowered(model, plan)
        with pytest.raises(RuntimeFault, match=r"gather table: row .* of a table of 9"):
            run_program(program, plan, model)


def test_an_operator_this_torch_lacks_is_named(tmp_path: Path) -> None:
    from dataclasses import replace

    from forebay.rewriter.ir.program import Launch

    model = chain(tmp_path, layers=1)
    _, program = streaming(model)
    step = tuple(replace(i, op="aten.relu_of_tomorrow.out") if isinstance(i, Launch) and "relu" in i.op else i
                 for i in program.step)
    target = device()
    target.allocate(program.arenas)
    with pytest.raises(RuntimeFault, match=r"relu_of_tomorrow\.out is not known to torch"):
        BoundProgram(replace(program, step=step), target)
    target.close()


def test_arenas_are_aligned_and_of_the_planned_size() -> None:
    target = device()
    for arena in target.arenas.values():
        assert arena.address % 4096 == 0 and arena.bytes.numel() == 8192
        assert arena.bytes.data_ptr() == arena.address
    target.close()
    assert target.arenas == {}


def submit_error(call: Callable[[], object]) -> str:
    try:
        call()
    except BaseException as error:
        return str(error)
    return ""


def test_an_error_of_the_upload_worker_comes_out_of_finish() -> None:
    target = device()
    target._worker(UPLOAD).submit(lambda: 1 / 0)
    assert "division" in submit_error(target.finish)
    target.close()
