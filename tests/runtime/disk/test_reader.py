"""Disk reads: exact bytes, untouched neighbours, order, errors, an empty page cache, clean shutdown; every engine."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from forebay.rewriter.ir.alignment import PAGE_NBYTES, ROW_GAP_NBYTES, ROW_READ_NBYTES
from forebay.runtime.disk import chunks as disk_chunks
from forebay.runtime.disk import reader as disk
from forebay.runtime.disk import threads, uring
from forebay.runtime.disk.chunk_queue import ChunkQueue, ReaderClosedError
from forebay.runtime.disk.open_file import TruncatedFileError
from forebay.runtime.disk.page_cache import in_page_cache_filesystem, resident_nbytes
from forebay.runtime.disk.reader import Read, open_reader

FILE_NBYTES = (3 << 20) + 1234
CANARY = 0xA5
ENGINES = [(kind, depth, chunk) for kind in disk.KINDS for depth, chunk in ((1, 64 << 10), (3, 256 << 10), (8, 4096))]


class Memory:
    """A page-aligned buffer filled with canaries."""

    def __init__(self, nbytes: int) -> None:
        self.map = mmap.mmap(-1, nbytes)
        self.map[:] = bytes([CANARY]) * nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


class Waiter:
    """Collects the ends of reads; `wait(n)` returns their errors in the order they ended."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, BaseException | None]] = []
        self._changed = threading.Condition()

    def callback(self, tag: int):
        def on_done(error: BaseException | None) -> None:
            with self._changed:
                self.ended.append((tag, error))
                self._changed.notify_all()

        return on_done

    def wait(self, count: int) -> list[tuple[int, BaseException | None]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ended) >= count, timeout=30), "a read never ended"
            return list(self.ended)


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(0).randbytes(FILE_NBYTES)


@pytest.fixture
def path(tmp_path: Path, data: bytes) -> str:
    file = tmp_path / "weights.bin"
    file.write_bytes(data)
    with file.open("rb+") as handle:
        os.fsync(handle.fileno())
    return str(file)


@pytest.fixture
def others() -> set[threading.Thread]:
    """Threads that were there before the reader: sessions that other tests keep open have readers of their own."""
    return set(threading.enumerate())


@pytest.fixture(params=ENGINES, ids=lambda e: f"{e[0]}-{e[1]}-{e[2]}")
def reader(request: pytest.FixtureRequest, others: set[threading.Thread]):
    kind, depth, chunk_nbytes = request.param
    if kind not in disk.available_kinds():
        pytest.skip("io_uring is not permitted here")
    reader = open_reader(kind, depth, chunk_nbytes)
    yield reader
    reader.close()


def test_unaligned_reads_are_exact_and_leave_their_neighbours_alone(reader, path: str, data: bytes) -> None:
    rng = random.Random(1)
    memory, waiter = Memory(24 << 20), Waiter()
    reads, position = [], 0
    for i in range(60):
        offset = rng.choice([0, 4096, FILE_NBYTES - 5000, rng.randrange(FILE_NBYTES)])
        nbytes = min(rng.choice([0, 1, 100, 4096, 9000, 300_000, 700_000]), FILE_NBYTES - offset)
        before, after = rng.choice([0, 100, 4095]), rng.choice([0, 50, 4095])
        position += before
        if rng.random() < 0.5:  # congruent: the read goes straight into place
            position += (offset - position) % PAGE_NBYTES
        reads.append((offset, nbytes, before, after, position))
        reader.submit(Read(path, offset, nbytes, memory.address + position, before, after, waiter.callback(i)))
        position += nbytes + after + rng.randrange(64)
    assert position < len(memory.map)
    assert [error for _, error in waiter.wait(len(reads)) if error] == []
    touchable = bytearray(len(memory.map))
    for offset, nbytes, before, after, at in reads:
        assert memory.map[at : at + nbytes] == data[offset : offset + nbytes]
        touchable[at - before : at + nbytes + after] = b"\1" * (before + nbytes + after)
    assert all(touchable[i] or memory.map[i] == CANARY for i in range(position + PAGE_NBYTES))


def test_a_prepared_read_is_queued_as_often_as_it_is_called(reader, path: str, data: bytes) -> None:
    memory, waiter = Memory(2 << 20), Waiter()
    queue = reader.prepare(Read(path, 777, 1_000_001, memory.address + 5, 0, 0, waiter.callback(0)))
    for times in range(1, 4):
        memory.map[5 : 5 + 1_000_001] = bytes(1_000_001)
        queue()
        assert waiter.wait(times)[-1] == (0, None)
        assert memory.map[5 : 5 + 1_000_001] == data[777 : 777 + 1_000_001]
    absent = reader.prepare(Read(path + ".absent", 0, 10, memory.address, 0, 0, waiter.callback(1)))
    for times in range(4, 6):  # what failed once is tried anew
        absent()
        assert isinstance(waiter.wait(times)[-1][1], FileNotFoundError)
    with pytest.raises(ValueError, match="must be >= 0"):
        reader.prepare(Read(path, -1, 10, 0, 0, 0, waiter.callback(2)))
    reader.close()
    with pytest.raises(RuntimeError, match="closed"):
        queue()


def test_one_engine_ends_small_reads_in_the_order_of_submission(path: str, data: bytes) -> None:
    memory, waiter = Memory(4000 * 512), Waiter()
    reader = open_reader("direct", depth=1)
    for i in range(512):
        reader.submit(Read(path, i * 3001, 3001, memory.address + i * 3001, 0, 0, waiter.callback(i)))
    assert waiter.wait(512) == [(i, None) for i in range(512)]
    reader.close()
    assert memory.map[: 512 * 3001] == data[: 512 * 3001]


def test_chunks_are_issued_in_file_order_across_reads(path: str) -> None:
    queue = ChunkQueue(True, 64 << 10, 64 << 10)
    ended: list[int] = []
    for i in range(3):
        read = Read(path, i * 300_000, 300_000, 300_000 * i, 0, 0, lambda _, i=i: ended.append(i))
        queue.put(queue.read_task(read))
    issued = []
    while (taken := queue.take(wait=False)) is not None:
        issued.append(taken)
    offsets = [chunk.offset + chunk.need for _, chunk in issued if chunk]
    assert len(offsets) >= 12 and offsets == sorted(offsets), "all three reads are in flight at once, in order"
    for job, chunk in reversed(issued):
        queue.finish(job, chunk, None)
    assert ended == [2, 1, 0], "a read ends when its own last chunk has landed"
    queue.close_files()


def test_many_threads_submit(reader, path: str, data: bytes) -> None:
    memory, waiter = Memory(4 * 64 * 5000), Waiter()

    def submit(part: int) -> None:
        for i in range(part * 64, part * 64 + 64):
            reader.submit(Read(path, i * 777, 5000, memory.address + i * 5000, 0, 0, waiter.callback(i)))

    threads = [threading.Thread(target=submit, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(waiter.wait(256)) == [(i, None) for i in range(256)]
    for i in range(256):
        assert memory.map[i * 5000 : (i + 1) * 5000] == data[i * 777 : i * 777 + 5000]


def test_a_truncated_file_is_named_and_the_next_read_works(reader, path: str, data: bytes) -> None:
    memory, waiter = Memory(2 << 20), Waiter()
    offset = FILE_NBYTES - 500_000
    reader.submit(Read(path, offset, 500_001, memory.address, 0, 0, waiter.callback(0)))
    reader.submit(Read(path, FILE_NBYTES + 8192, 10, memory.address, 0, 0, waiter.callback(1)))
    reader.submit(Read(path + ".absent", 0, 10, memory.address, 0, 0, waiter.callback(2)))
    reader.submit(Read(path, 5, 1000, memory.address + (1 << 20), 0, 0, waiter.callback(3)))
    errors = dict(waiter.wait(4))
    assert isinstance(errors[0], TruncatedFileError) and isinstance(errors[1], TruncatedFileError)
    for part in (path, "expected 500001 bytes", f"offset {offset}", f"holds {FILE_NBYTES}"):
        assert part in str(errors[0])
    assert isinstance(errors[2], FileNotFoundError) and "weights.bin.absent" in str(errors[2])
    assert errors[3] is None and memory.map[1 << 20 : (1 << 20) + 1000] == data[5:1005]


@pytest.mark.parametrize("row_nbytes", [64, 1152, 4096, 200_000])
def test_rows_are_gathered_with_duplicates(reader, path: str, data: bytes, row_nbytes: int) -> None:
    rng = random.Random(row_nbytes)
    base = 777
    count = (FILE_NBYTES - base) // row_nbytes
    rows = [rng.randrange(count) for _ in range(40)] + [count - 1, 0, count - 1]
    rows += rows[:10]
    memory, waiter = Memory((len(rows) + 1) * row_nbytes), Waiter()
    reader.read_rows(path, base, row_nbytes, rows, memory.address + 3, waiter.callback(0))
    assert waiter.wait(1) == [(0, None)]
    expected = b"".join(data[base + row * row_nbytes : base + (row + 1) * row_nbytes] for row in rows)
    assert memory.map[3 : 3 + len(expected)] == expected
    assert memory.map[:3] == bytes([CANARY]) * 3 and memory.map[3 + len(expected)] == CANARY


def test_repeated_rows_are_read_once() -> None:
    chunks = disk_chunks.split_rows(100, 1000, [7, 7, 7, 900, 7], 0, 64 << 10)
    assert [(chunk.offset, chunk.nbytes, len(chunk.copies)) for chunk in chunks] == [(4096, 4096, 4), (897024, 4096, 1)]


def test_rows_near_each_other_come_in_one_read() -> None:
    """With what lies between, if that is quicker to read than to ask again."""
    far = ROW_GAP_NBYTES // PAGE_NBYTES + 1  # the page behind the gap
    for row, expected in ((far, [(0, far + 1)]), (far + 1, [(0, 1), (far + 1, 1)])):
        chunks = disk_chunks.split_rows(0, PAGE_NBYTES, [row, 0], 0, 1 << 22)
        assert [(c.offset // PAGE_NBYTES, c.nbytes // PAGE_NBYTES) for c in chunks] == expected
    dense = disk_chunks.split_rows(0, PAGE_NBYTES, range(200), 0, 1 << 22)
    assert max(chunk.nbytes for chunk in dense) == ROW_READ_NBYTES


def test_an_empty_gather_ends(reader, path: str) -> None:
    waiter = Waiter()
    reader.read_rows(path, 0, 64, [], 0, waiter.callback(0))
    assert waiter.wait(1) == [(0, None)]


@pytest.mark.parametrize("kind", disk.KINDS)
def test_the_page_cache_is_left_empty(kind: str, path: str, data: bytes, tmp_path: Path) -> None:
    if in_page_cache_filesystem(tmp_path):
        pytest.skip("tmpfs is the page cache")
    if kind not in disk.available_kinds():
        pytest.skip("io_uring is not permitted here")
    assert resident_nbytes(path) > 0, "written just now, so the test starts from a cached file"
    memory, waiter = Memory(FILE_NBYTES), Waiter()
    reader = open_reader(kind, chunk_nbytes=200_000)
    spans = [(0, 100_001), (100_001, 900_000), (2_000_000, 555), (1_000_003, 700_000)]
    for i, (offset, nbytes) in enumerate(spans):
        reader.submit(Read(path, offset, nbytes, memory.address + offset, 0, 0, waiter.callback(i)))
    reader.read_rows(path, 50, 100, [1, 2, 20_000], memory.address + 2_500_000, waiter.callback(9))
    waiter.wait(5)
    reader.close()
    assert all(memory.map[o : o + n] == data[o : o + n] for o, n in spans)
    assert resident_nbytes(path) == 0


def test_tmpfs_falls_back_to_buffered_reads(reader, data: bytes) -> None:
    folder = Path("/dev/shm")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        pytest.skip("no tmpfs here")
    file = folder / f"forebay-test-{os.getpid()}.bin"
    memory, waiter = Memory(1 << 20), Waiter()
    try:
        file.write_bytes(data[:900_000])
        reader.submit(Read(str(file), 4097, 800_000, memory.address + 1, 0, 0, waiter.callback(0)))
        reader.submit(Read(str(file), 4097, 900_000, memory.address, 0, 0, waiter.callback(1)))
        errors = dict(waiter.wait(2))
    finally:
        file.unlink()
    assert errors[0] is None and isinstance(errors[1], TruncatedFileError)


def test_close_with_reads_in_flight_ends_every_read_once(reader, others: set[threading.Thread], path: str) -> None:
    memory, waiter = Memory(64 << 20), Waiter()
    for i in range(20):
        reader.submit(Read(path, 0, 3 << 20, memory.address + i * (3 << 20), 0, 0, waiter.callback(i)))
    reader.close()
    ended = waiter.wait(20)
    assert sorted(tag for tag, _ in ended) == list(range(20))
    assert all(error is None or isinstance(error, ReaderClosedError) for _, error in ended)
    running = [thread.name for thread in set(threading.enumerate()) - others if thread.name.startswith("forebay-")]
    assert running == [], "nothing is left that could write to memory"
    with pytest.raises(RuntimeError, match="closed"):
        reader.submit(Read(path, 0, 1, memory.address, 0, 0, waiter.callback(99)))
    reader.close()


def test_a_faulty_callback_does_not_stop_the_engine(reader, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(str(args.exc_value)))
    memory, waiter = Memory(8192), Waiter()

    def fail(_: BaseException | None) -> None:
        raise ZeroDivisionError("callback")

    reader.submit(Read(path, 0, 10, memory.address, 0, 0, fail))
    reader.submit(Read(path, 0, 10, memory.address, 0, 0, waiter.callback(0)))
    waiter.wait(1)
    reader.close()
    assert seen == ["callback"]


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="warp"):
        open_reader("warp")
    with pytest.raises(ValueError, match="depth"):
        open_reader("direct", depth=0)
    with pytest.raises(ValueError, match="chunk_nbytes"):
        open_reader("direct", chunk_nbytes=100)


@settings(max_examples=examples(400), deadline=None)
@given(
    offset=st.integers(0, 50_000),
    nbytes=st.integers(0, 300_000),
    address=st.integers(100_000, 120_000),
    congruent=st.booleans(),
    room=st.tuples(st.sampled_from([0, 1, 2000, 4095, 9000]), st.sampled_from([0, 1, 2000, 4095, 9000])),
    direct=st.booleans(),
    chunk_nbytes=st.sampled_from([4096, 5000, 12288, 65536, 1 << 20]),
    bounce_nbytes=st.sampled_from([65536, 131072]),
)
def test_split_covers_a_read_exactly(
    offset: int, nbytes: int, address: int, congruent: bool, room, direct: bool, chunk_nbytes: int, bounce_nbytes: int
) -> None:
    if congruent:
        address += (offset - address) % PAGE_NBYTES
    read = Read("", offset, nbytes, address, *room, lambda _: None)
    landed = bytearray(nbytes)
    end = None
    for chunk in disk_chunks.split_read(read, direct, chunk_nbytes, bounce_nbytes):
        assert end is None or chunk.offset == end, "chunks follow each other in the file"
        end = chunk.offset + chunk.nbytes
        assert 0 < chunk.need <= chunk.nbytes <= max(chunk_nbytes, PAGE_NBYTES)
        assert chunk.head + chunk.tail <= bounce_nbytes
        middle = range(chunk.address, chunk.address + chunk.nbytes - chunk.head - chunk.tail)
        if direct:
            assert all(n % PAGE_NBYTES == 0 for n in (chunk.offset, chunk.nbytes, chunk.head, chunk.tail))
            assert not middle or chunk.address % PAGE_NBYTES == 0
        assert not middle or (
            middle.start >= address - room[0]
            and middle.stop <= address + nbytes + room[1]
            and middle.start - (chunk.offset + chunk.head) == address - offset
        )
        if direct and congruent and min(room) >= 4095:
            assert not chunk.copies, "with room, nothing is copied"
        spans = [(middle.start, len(middle)), *((to, n) for _, to, n in chunk.copies)]
        for source, to, n in chunk.copies:
            start = chunk.offset + source if source < chunk.head else chunk.offset + chunk.nbytes - chunk.tail
            assert start - offset == to - address and n > 0 and source + n <= chunk.head + chunk.tail
        for to, n in spans:
            for i in range(max(to - address, 0), min(to - address + n, nbytes)):
                landed[i] += 1
    assert landed == b"\1" * nbytes, "every wanted byte lands once"


@settings(max_examples=examples(300), deadline=None)
@given(
    offset=st.integers(0, 10_000),
    row_nbytes=st.integers(1, 100_000),
    rows=st.lists(st.integers(0, 50), max_size=20),
    bounce_nbytes=st.sampled_from([65536, 131072]),
)
def test_split_rows_covers_every_row(offset: int, row_nbytes: int, rows: list[int], bounce_nbytes: int) -> None:
    spans: dict[int, list[tuple[int, int]]] = {}
    end = 0
    for chunk in disk_chunks.split_rows(offset, row_nbytes, rows, 0, bounce_nbytes):
        assert chunk.offset >= end, "no page is read twice"
        end = chunk.offset + chunk.nbytes
        assert chunk.offset % PAGE_NBYTES == chunk.nbytes % PAGE_NBYTES == 0
        assert chunk.head == chunk.nbytes <= bounce_nbytes and chunk.need <= chunk.nbytes
        for source, to, n in chunk.copies:
            index, within = divmod(to, row_nbytes)
            assert chunk.offset + source == offset + rows[index] * row_nbytes + within
            assert source + n <= chunk.need
            spans.setdefault(index, []).append((within, within + n))
    assert sorted(spans) == list(range(len(rows)))
    for parts in spans.values():
        parts.sort()
        assert [a for a, _ in parts] == [0, *(b for _, b in parts[:-1])] and parts[-1][1] == row_nbytes


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 5), st.data())
def test_pieces_resume_where_a_partial_read_ended(head: int, tail: int, middle: int, draw) -> None:
    chunk = disk_chunks.Chunk(0, head + middle + tail, 0, head, tail, 1000, ())
    whole = [*range(head), *range(1000, 1000 + middle), *range(head, head + tail)]
    got = draw.draw(st.integers(0, len(whole)))
    left = [i for start, n in disk_chunks.pieces(chunk, 0, got) for i in range(start, start + n)]
    assert left == whole[got:]


KINDS = [kind for kind in disk.KINDS if kind in disk.available_kinds()]


@pytest.mark.parametrize("good", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_fails_names_its_file(kind: str, good: int, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first read, which shows whether direct ones are possible, and after `good` ones."""
    preadv, reap, left = os.preadv, uring._Ring.reap, good

    def fail(*given: Any) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(*given)

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(uring._Ring, "reap", lambda ring: [
        (slot, result if slot == uring.WAKE else -errno.EIO) for slot, result in reap(ring)])
    memory, waiter, reader = Memory(PAGE_NBYTES), Waiter(), open_reader(kind)
    try:
        for number in range(good + 1):
            reader.submit(Read(path, 0, PAGE_NBYTES, memory.address, 0, 0, waiter.callback(number)))
        error = next(error for _, error in waiter.wait(good + 1) if error is not None)
    finally:
        reader.close()
    assert isinstance(error, OSError) and (error.errno, error.filename) == (errno.EIO, path), error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [MemoryError("none left"), OSError(12, "Cannot allocate memory"), SystemExit()])
def test_a_thread_that_breaks_off_ends_every_read(
    kind: str, error: BaseException, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those queued, those in flight and those that come later are told, each once, and nothing hangs."""
    monkeypatch.setattr(uring, "BREAK_OFF_S", 0.2)
    memory, waiter = Memory(1 << 20), Waiter()
    reader = open_reader(kind, 2, 4096)
    take, broken = ChunkQueue.take, threading.Event()

    def breaking(self: ChunkQueue, wait: bool):
        if self.jobs and not broken.is_set():
            broken.set()
            raise error
        return take(self, wait)

    monkeypatch.setattr(ChunkQueue, "take", breaking)
    try:
        for i in range(5):
            try:
                reader.submit(Read(path, 8192 * i, 8192, memory.address + 8192 * i, 0, 0, waiter.callback(i)))
            except RuntimeError as refused:
                assert "the disk reader broke off" in str(refused)
                waiter.callback(i)(refused)
        ended = waiter.wait(5)
        assert {tag for tag, _ in ended} == set(range(5)) and any(found is not None for _, found in ended)
        assert not any(isinstance(found, SystemExit) for _, found in ended), "who waits would end without a word"
        assert isinstance(reader.fault(), Exception)
        with pytest.raises(RuntimeError, match="the disk reader broke off"):
            reader.submit(Read(path, 0, 4096, memory.address, 0, 0, waiter.callback(9)))
    finally:
        monkeypatch.undo()
        reader.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_that_vanishes_is_a_fault(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of ours ran in it any more, so nobody was told; the watch of a wait sees it."""
    from forebay.runtime.disk.threads import ThreadEngine

    for engine in (ThreadEngine, uring.UringEngine):
        monkeypatch.setattr(engine, "_run", lambda self, *given: None)
    reader = open_reader(kind)
    for _ in range(1000):
        if reader.fault() is not None:
            break
        time.sleep(0.01)
    assert "has ended" in str(reader.fault())
    reader.close()


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_a_reader_cannot_have_is_its_openers_error(
    kind: str, monkeypatch: pytest.MonkeyPatch, others: set[threading.Thread]
) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def full(*given: object, **how: object):
        raise OSError(12, "Cannot allocate memory")

    for module in (threads, uring):
        monkeypatch.setattr(module.mmap, "mmap", full)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        open_reader(kind)
    assert len(os.listdir("/proc/self/fd")) == before and set(threading.enumerate()) <= others


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_a_reader_does_with_the_threads_it_gets(
    kind: str, allowed: int, path: str, data: bytes, monkeypatch: pytest.MonkeyPatch, others: set[threading.Thread]
) -> None:
    before, start, left = len(os.listdir("/proc/self/fd")), threading.Thread.start, allowed

    def limited(self: threading.Thread) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    if not allowed:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            open_reader(kind, 8)
        assert len(os.listdir("/proc/self/fd")) == before and set(threading.enumerate()) <= others
        return
    reader, memory, waiter = open_reader(kind, 8, 4096), Memory(1 << 20), Waiter()
    assert reader.fault() is None
    reader.submit(Read(path, 0, 1 << 20, memory.address, 0, 0, waiter.callback(0)))
    assert waiter.wait(1) == [(0, None)] and memory.map[:] == data[: 1 << 20]
    reader.close()
    assert reader.fault() is None
