"""Stores on the thread device, with real files: what is computed does not depend on when copies are made, and a disk
that fails is one error that says where."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from carried import COUNT, PAGE, Carried
from tiny import bytes_at, issue

from forebay.rewriter.ir.program import (
    COMPUTE,
    DOWNLOAD,
    LOAD,
    RETURN,
    UNORDERED,
    UPLOAD,
    WRITE,
    Copy,
    Program,
    Record,
    Release,
    Rows,
    Span,
    TensorRef,
    Wait,
)
from forebay.rewriter.verify.program import ProgramError, verify_program
from forebay.runtime.devices import outward
from forebay.runtime.devices.cpu.device import ThreadDevice
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.devices.outward import SpillFault
from forebay.runtime.disk.chunks import Read, Write
from forebay.runtime.disk.page_cache import cached_nbytes, in_page_cache_filesystem
from forebay.runtime.disk.reader import DiskReader, available_kinds, open_reader
from forebay.runtime.disk.spill import SpillSpace
from forebay.runtime.run.executor import BoundProgram
from forebay.runtime.run.trace import Trace

KINDS = [Carried(layers, k, tier, hop, ahead) for layers, k in ((3, 2), (2, 3), (1, 1))
         for tier, hop in (("disk", False), ("disk", True), ("host", False)) for ahead in (False, True)]


def device(folder: Path, reader: DiskReader | None = None, **options: bool) -> ThreadDevice:
    return ThreadDevice(reader or open_reader("direct"), spill=SpillSpace(str(folder)), **options)


def begin(kind: Carried, target: ThreadDevice, program: Program) -> BoundProgram:
    """The program bound, with x of ones, twos, …, and an empty cache."""
    target.allocate(program.arenas)
    for arena in target.arenas.values():
        arena.bytes.fill_(0xFF)
    bound = BoundProgram(program, target)
    for k in range(kind.micro_batches):
        target.tensor(kind.x(k)).copy_(x(k))
    if kind.tier == "host":
        target.arenas["host"].bytes.zero_()
    return bound


def x(k: int) -> torch.Tensor:
    return torch.arange(COUNT) * 0.25 + k


def check(kind: Carried, target: ThreadDevice, steps: int) -> None:
    """x, and the cache where it lies, are those of `steps` steps."""
    target.finish()
    expected, cache = kind.expected([x(k) for k in range(kind.micro_batches)], steps)
    for k, value in enumerate(expected):
        assert torch.equal(target.tensor(kind.x(k)), value)
    for n, value in enumerate(cache):
        span = kind.cache(n)
        if kind.tier == "host":
            data = bytes(target.arenas["host"].bytes[span.offset : span.offset + span.nbytes].numpy())
        else:
            assert target.spill is not None
            fd = os.open(target.spill["cache"].path, os.O_RDONLY)
            data = os.pread(fd, span.nbytes, span.offset)
            os.close(fd)
        assert data == bytes(value.numpy().tobytes()), f"c{n}"


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("options", [{}, {"poison": True}, {"sync": True}], ids=str)
def test_the_cache_is_carried_from_step_to_step(tmp_path: Path, kind: Carried, options: dict[str, bool]) -> None:
    program = kind.program()
    verify_program(program)
    target = device(tmp_path, **options)
    bound = begin(kind, target, program)
    bound.start()
    for _ in range(4):
        bound.run()
    check(kind, target, 4)
    assert list(tmp_path.iterdir()) == []
    target.close()


@pytest.mark.parametrize("method", available_kinds())
def test_every_engine_gives_the_same(tmp_path: Path, method: str) -> None:
    kind = Carried(3, 3)
    target = ThreadDevice(open_reader(method), spill=SpillSpace(str(tmp_path), method, 2, PAGE))
    bound = begin(kind, target, kind.program())
    bound.start()
    for _ in range(3):
        bound.run()
    target.finish()
    assert target.spill is not None
    file = target.spill["cache"]
    if not in_page_cache_filesystem(tmp_path):
        target.readers[LOAD].close()
        assert cached_nbytes(file.fd) == 0
    check(kind, target, 3)
    target.close()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_bytes_on_every_link_are_the_programs(tmp_path: Path, kind: Carried) -> None:
    """In both directions, prologue and steps, to the byte; of rows those that were named."""
    program, trace = kind.program(), Trace()
    target = ThreadDevice(open_reader("direct"), spill=SpillSpace(str(tmp_path)), trace=trace)
    bound = begin(kind, target, program)
    bound.start()
    for _ in range(3):
        bound.run()
    target.finish()
    far = "host" if kind.tier == "host" else "disk"
    expected = program.link_nbytes(3, started=False)
    assert trace.link_nbytes() == expected
    loads = 3 * kind.turns + kind.ahead
    there, back = ({("disk", "host"), ("host", "device")}, {("device", "host"), ("host", "disk")}) if kind.hop else (
        {(far, "device")}, {("device", far)})
    assert expected == {link: loads * 4 * COUNT for link in there} | {link: 3 * kind.turns * 4 * COUNT for link in back}
    target.close()


def test_a_trace_counts_the_rows_that_were_moved_and_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                ) -> None:
    target = rows_device(tmp_path)
    target.trace = Trace()
    say(target, [4, -1, 0, -1])
    store_and_load(target, Rows(POOL, PAGE, INDEX, skips=True), Rows(POOL, PAGE), 6)
    assert target.trace.link_nbytes() == {("device", "disk"): 2 * PAGE, ("disk", "device"): 6 * PAGE}
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    issue(target, Copy(WRITE, DENSE, Rows(POOL, PAGE, INDEX, skips=True), "store"))
    with pytest.raises(SpillFault):
        target.finish()
    assert target.trace.link_nbytes()["device", "disk"] == 2 * PAGE
    target.close()


LATE_S = 0.2


class Slow:
    """An engine whose requests are each made on a thread of their own after a random while, in any order."""

    def __init__(self, seed: int, delays_s: tuple[float, ...] = (0.0, 0.001, 0.004)) -> None:
        self.chance, self.threads, self.delays_s = random.Random(seed), list[threading.Thread](), delays_s

    def later(self, run: Callable[[], None]) -> None:
        delay = self.chance.choice(self.delays_s)

        def wait() -> None:
            time.sleep(delay)
            run()

        self.threads.append(threading.Thread(target=wait))
        self.threads[-1].start()

    def prepare(self, read: Read) -> Callable[[], None]:
        return lambda: self.submit(read)

    def submit(self, read: Read) -> None:
        def run() -> None:
            fd = os.open(read.path, os.O_RDONLY)
            runs = list(read.runs or [(0, 0, read.nbytes)])
            for source, target, nbytes in self.chance.sample(runs, len(runs)):
                data, to = os.pread(fd, nbytes, read.offset + source), read.address + target
                bytes_at(to - read.room_before, read.room_before + nbytes + read.room_after).fill_(0x55)
                bytes_at(to, nbytes).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            os.close(fd)
            read.on_done(None)

        self.later(run)

    def prepare_write(self, file: object, write: Write) -> Callable[[], None]:
        return lambda: self.write(file, write)

    def write(self, file: object, write: Write) -> None:
        def run() -> None:
            data = b"".join(bytes(bytes_at(address, nbytes).numpy()) for address, nbytes in write.pieces)
            fd = os.open(file.path, os.O_WRONLY)  # type: ignore[attr-defined]
            os.pwrite(fd, data.ljust(write.nbytes, b"\0"), write.offset)
            os.close(fd)
            write.on_done(None)

        self.later(run)

    def close(self) -> None:
        for thread in self.threads:
            thread.join()


class SlowSpace(SpillSpace):
    def __init__(self, folder: str, seed: int) -> None:
        super().__init__(folder)
        self._writer = Slow(seed)  # type: ignore[assignment]


def slowed(folder: Path, seed: int, poison: bool = False) -> ThreadDevice:
    """A device each of whose streams is late at random."""
    target = ThreadDevice(Slow(seed), spill=SlowSpace(str(folder), seed + 100), poison=poison)  # type: ignore[arg-type]
    chance = random.Random(seed + 200)
    for stream in (UPLOAD, RETURN, DOWNLOAD):
        worker = target._worker(stream)
        submit = worker.submit

        def late(call: Callable[[], object], submit: Callable = submit) -> None:
            delay = chance.choice([0.0, 0.001, 0.003])
            submit(lambda: (time.sleep(delay), call()))

        worker.submit = late  # type: ignore[method-assign]
    return target


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_copies_that_are_late_and_overtake_each_other_change_nothing(tmp_path: Path, kind: Carried, seed: int) -> None:
    target = slowed(tmp_path, seed, poison=seed == 2)
    bound = begin(kind, target, kind.program())
    bound.start()
    for _ in range(3):
        bound.run()
    check(kind, target, 3)
    target.close()


@pytest.mark.parametrize("kind", [Carried(3, 2), Carried(3, 2, hop=True), Carried(3, 2, tier="host")], ids=str)
def test_a_wait_left_out_changes_what_is_computed(tmp_path: Path, kind: Carried) -> None:
    """What the proof refuses is a fault indeed: a step that computes before what it loads has arrived. Loads take
    longer than a busy machine may keep the computing thread waiting, so that no luck makes all of them early enough."""
    program = kind.program()
    landings = [i for i, item in enumerate(program.step) if isinstance(item, Wait) and item.stream == COMPUTE]
    broken = replace(program, step=tuple(item for i, item in enumerate(program.step) if i not in landings))
    with pytest.raises(ProgramError):
        verify_program(broken)
    target = device(tmp_path, Slow(0, (LATE_S,)))  # type: ignore[arg-type]
    back, submit = target._worker(RETURN), target._worker(RETURN).submit  # which brings caches from host memory
    back.submit = lambda call: submit(lambda: (time.sleep(LATE_S), call()))  # type: ignore[method-assign]
    bound = begin(kind, target, broken)
    bound.start()
    bound.run()
    with pytest.raises(AssertionError):
        check(kind, target, 1)
    target.close()


def bytes_of(target: ThreadDevice, arena: str, offset: int, nbytes: int) -> torch.Tensor:
    return target.arenas[arena].bytes[offset : offset + nbytes]


INDEX = TensorRef("device", 0, "int64", (4,), (1,), "index")
COUNT_REF = TensorRef("device", 64, "int64", (1,), (1,), "count")
DENSE = Span("device", PAGE, 4 * PAGE, "dense")
POOL = Span("pool", PAGE, 6 * PAGE, "k")


def rows_device(folder: Path, seed: int | None = None) -> ThreadDevice:
    target = device(folder) if seed is None else slowed(folder, seed)
    target.allocate({"device": 16 * PAGE, "host": 8 * PAGE})
    target.open_files({"pool": 8 * PAGE})
    for i in range(4):
        bytes_of(target, "device", (1 + i) * PAGE, PAGE).fill_(i + 1)
    return target


def say(target: ThreadDevice, index: list[int] | None = None, count: int | None = None) -> None:
    if index is not None:
        target.tensor(INDEX).copy_(torch.tensor(index))
    if count is not None:
        target.tensor(COUNT_REF).fill_(count)


def store_and_load(target: ThreadDevice, store: Rows, load: Rows, to: int) -> list[int]:
    """Store DENSE into rows of the pool, load rows of it to page `to`; the first byte of each page there, 255 where
    nothing landed."""
    pages = load.nbytes // PAGE
    bytes_of(target, "device", to * PAGE, pages * PAGE).fill_(255)
    issue(target, Copy(WRITE, DENSE, store, "store"), Record(WRITE, 1), Wait(LOAD, 1),
          Copy(LOAD, load, Span("device", to * PAGE, pages * PAGE, "back"), "load"), Record(LOAD, 2), Wait(COMPUTE, 2))
    found = bytes_of(target, "device", to * PAGE, pages * PAGE).view(pages, PAGE)
    assert (found == found[:, :1]).all()
    return found[:, 0].tolist()


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_rows_are_named_when_the_copy_runs(tmp_path: Path, seed: int | None) -> None:
    target = rows_device(tmp_path, seed)
    scatter, whole = Rows(POOL, PAGE, INDEX, skips=True), Rows(POOL, PAGE)
    say(target, [4, 5, 0, -1])
    assert store_and_load(target, scatter, whole, 6) == [3, 0, 0, 0, 1, 2]
    say(target, [-1, -1, -1, 2])
    assert store_and_load(target, scatter, whole, 6) == [3, 0, 4, 0, 1, 2]
    say(target, count=3)
    assert store_and_load(target, scatter, replace(whole, count=COUNT_REF), 6) == [3, 0, 4, 255, 255, 255]
    say(target, [5, -1, 4, 5], 4)
    gather = Rows(POOL, PAGE, INDEX, COUNT_REF, skips=True)
    bytes_of(target, "device", 6 * PAGE, 4 * PAGE).fill_(255)
    issue(target, Copy(LOAD, gather, Span("device", 6 * PAGE, 4 * PAGE, "back"), "load"), Record(LOAD, 3),
          Wait(COMPUTE, 3))
    assert bytes_of(target, "device", 6 * PAGE, 4 * PAGE)[::PAGE].tolist() == [2, 255, 1, 2]
    target.close()


def test_a_table_is_thought_about_once_for_all_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And anew when it, or how many rows of it count, says something else; its runs are one read."""
    target, thought, reads = rows_device(tmp_path, None), list[str](), list[int]()
    found, submit = outward._runs, target.readers[LOAD].submit
    monkeypatch.setattr(outward, "_runs", lambda *args: thought.append(args[-1]) or found(*args))
    monkeypatch.setattr(target.readers[LOAD], "submit", lambda read: reads.append(len(read.runs)) or submit(read))
    rows = Rows(POOL, PAGE, INDEX, COUNT_REF, skips=True)
    calls = [target.bind(Copy(LOAD, rows, Span("device", 6 * PAGE, 4 * PAGE, "back"), f"layer {i}"), None)
             for i in range(3)]

    def all_layers() -> None:
        for call in calls:
            assert call is not None
            call()
        target.finish()

    say(target, [4, 5, -1, 0], 4)
    all_layers()
    assert thought == ["layer 0"] and reads == [2, 2, 2]
    say(target, count=1)
    all_layers()
    say(target, [4, 1, -1, 0])
    all_layers()
    assert thought == ["layer 0"] * 3 and reads[3:] == [1] * 6
    say(target, [9, 1, -1, 0], 2)
    for call in calls:  # what is refused is refused each time
        with pytest.raises(RuntimeFault, match="row 9 of a table of"):
            call()  # type: ignore[misc]
    target.close()


def test_rows_move_between_arenas(tmp_path: Path) -> None:
    """Blocks of a cache in host memory: down to rows that a tensor names, and up from there."""
    target = rows_device(tmp_path)
    pool, back = Span("host", PAGE, 6 * PAGE, "k"), Span("device", 6 * PAGE, 4 * PAGE, "back")
    target.arenas["host"].bytes.zero_()
    say(target, [3, 1, -1, 0])
    rows = Rows(pool, PAGE, INDEX, skips=True)
    bytes_of(target, "device", 6 * PAGE, 4 * PAGE).fill_(255)
    issue(target, Copy(DOWNLOAD, DENSE, rows, "down"), Record(DOWNLOAD, 1), Wait(UPLOAD, 1),
          Copy(UPLOAD, rows, back, "up"), Record(UPLOAD, 2), Wait(COMPUTE, 2))
    assert target.arenas["host"].bytes[::PAGE].tolist() == [0, 4, 2, 0, 1, 0, 0, 0]
    assert bytes_of(target, "device", 6 * PAGE, 4 * PAGE)[::PAGE].tolist() == [1, 2, 255, 4]
    target.close()


@pytest.mark.parametrize(("index", "count", "message"), [
    ([0, 1, 2, 6], 4, "row 6 of a table of 6"), ([0, -1, 2, 3], 4, "row -1 of a table of 6"),
    ([0, 1, 2, 3], 5, "5 rows are to be moved, of 4 at most"), ([0, 1, 2, 3], -1, "-1 rows are to be moved"),
])
@pytest.mark.parametrize("stream", [WRITE, LOAD])
def test_rows_that_are_not_there_are_refused(
    tmp_path: Path, stream: str, index: list[int], count: int, message: str
) -> None:
    target = rows_device(tmp_path)
    say(target, index, count)
    rows = Rows(POOL, PAGE, INDEX, COUNT_REF)
    copy = Copy(WRITE, DENSE, rows, "c") if stream == WRITE else Copy(LOAD, rows, DENSE, "c")
    with pytest.raises(RuntimeFault, match=f"c: {message}"):
        issue(target, copy)
    target.finish()
    target.close()


FAULTS = [(errno.EIO, "Input/output error"), (errno.ENOSPC, "No space left on device"), (0, "the disk took 0 of")]


@pytest.mark.covering(2)
@pytest.mark.parametrize("hop", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("fault", "reason"), FAULTS)
def test_a_write_that_fails_is_one_error_that_names_tier_tensor_and_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int, reason: str, hop: bool, ahead: bool
) -> None:
    kind = Carried(3, 2, hop=hop, ahead=ahead)
    target = device(tmp_path)
    bound = begin(kind, target, kind.program())
    bound.start()
    bound.run()
    wrote = os.pwritev

    def fail(fd: int, buffers: list, offset: int) -> int:
        if offset != 3 * PAGE:
            return wrote(fd, buffers, offset)
        if fault:
            raise OSError(fault, os.strerror(fault))
        return 0

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(SpillFault, match=f"disk: writing c3 of layer 1 to the spill file cache failed .*{reason}") as e:
        for _ in range(3):
            bound.run()
        target.finish()
    assert "\n" not in str(e.value)
    with pytest.raises(SpillFault, match="c3 of layer 1"):
        target.finish()
    target.close()
    assert list(tmp_path.iterdir()) == []


def test_a_read_of_a_spill_file_that_fails_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Carried(3, 2)
    target = device(tmp_path)
    bound = begin(kind, target, kind.program())
    bound.start()
    target.finish()
    read = os.preadv

    def fail(fd: int, buffers: list, offset: int) -> int:
        if offset == 4 * PAGE:
            raise OSError(errno.EIO, "Input/output error")
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(SpillFault, match=r"disk: reading c4 of layer 2 from the spill file cache failed .*Input"):
        bound.run()
    target.close()


def test_an_error_while_downloading_comes_out_of_the_step_or_its_end(tmp_path: Path) -> None:
    kind = Carried(2, 1, hop=True)
    target = device(tmp_path)
    bound = begin(kind, target, kind.program())
    target._worker(DOWNLOAD).submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bound.start()
        bound.run()
        target.finish()
    target.close()


def killed(target: ThreadDevice, who: str) -> None:
    """A writer's thread, or a worker, ends as no error of a copy ends it."""
    if who != WRITE:
        target._worker(who)._queue.put(None)
        return
    assert target.spill is not None
    queue = target.spill.writer._queue  # type: ignore[attr-defined]
    take = queue.take

    def die(wait: bool) -> object:
        if wait:
            raise SystemExit
        return take(wait)

    queue.take = die


@pytest.mark.parametrize(("kind", "who"), [
    (Carried(3, 2), WRITE), (Carried(3, 2, hop=True), WRITE), (Carried(3, 2, hop=True), DOWNLOAD),
    (Carried(3, 2, hop=True), UPLOAD), (Carried(3, 2, tier="host"), DOWNLOAD)], ids=str)
def test_a_killed_worker_is_an_error_and_not_a_hang(tmp_path: Path, kind: Carried, who: str) -> None:
    target = device(tmp_path)
    bound = begin(kind, target, kind.program())
    bound.start()
    bound.run()
    killed(target, who)
    errors: list[BaseException] = []

    def steps() -> None:
        try:
            for _ in range(3):
                bound.run()
            target.finish()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=steps, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    assert len(errors) == 1 and isinstance(errors[0], RuntimeError), errors
    target.close()
    assert list(tmp_path.iterdir()) == []


def test_a_device_without_a_folder_says_so(tmp_path: Path) -> None:
    target = ThreadDevice(open_reader("direct"))
    with pytest.raises(RuntimeFault, match="was given no folder"):
        begin(Carried(), target, Carried().program())
    target.close()


def test_poison_on_the_download_stream_waits_its_turn(tmp_path: Path) -> None:
    target = device(tmp_path, poison=True)
    target.allocate({"device": PAGE, "host": PAGE})
    gate = threading.Event()
    host, place = Span("host", 0, 64, "h"), Span("device", 0, 64, "d")
    target.arenas["device"].bytes.fill_(7)
    target._worker(DOWNLOAD).submit(gate.wait)
    issue(target, Copy(DOWNLOAD, place, host, "down"), Release(DOWNLOAD, host))
    assert (target.arenas["host"].bytes[:64] != 0xFF).all()
    gate.set()
    target.finish()
    assert (target.arenas["host"].bytes[:64] == 0xFF).all()
    target.close()


def test_all_unordered_streams_have_a_ledger(tmp_path: Path) -> None:
    target = device(tmp_path)
    assert set(target.ledgers) == set(UNORDERED)
    target.close()
