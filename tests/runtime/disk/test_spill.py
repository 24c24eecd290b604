"""Spill files: what is written is read back, nothing is cached or left over, and a disk that fails says so once."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from forebay.rewriter.ir.alignment import whole_pages
from forebay.runtime.disk import reader as disk
from forebay.runtime.disk import spill_file
from forebay.runtime.disk.chunk_queue import ReaderClosedError
from forebay.runtime.disk.chunks import GATHER_NBYTES, PAGE_NBYTES, Read, Write, split_write
from forebay.runtime.disk.page_cache import cached_nbytes, in_page_cache_filesystem
from forebay.runtime.disk.reader import available_kinds, open_reader, open_writer
from forebay.runtime.disk.spill import SpillSpace
from forebay.runtime.disk.spill_file import SpillError, SpillFile, require_spill_folder

PAGE = PAGE_NBYTES
NBYTES = 512 * PAGE


class Memory:
    """Page-aligned memory of random bytes."""

    def __init__(self, nbytes: int, seed: int = 0) -> None:
        self.map = mmap.mmap(-1, nbytes)
        self.map[:] = random.Random(seed).randbytes(nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


class Ends:
    """Errors of what has ended, by tag."""

    def __init__(self) -> None:
        self.found: dict[int, BaseException | None] = {}
        self.changed = threading.Condition()

    def of(self, tag: int):
        def on_done(error: BaseException | None) -> None:
            with self.changed:
                assert tag not in self.found, "told twice"
                self.found[tag] = error
                self.changed.notify_all()

        return on_done

    def wait(self, count: int) -> dict[int, BaseException | None]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.found) >= count, timeout=30), "a write never ended"
            return self.found


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SpillFile]:
    made = SpillFile("cache", str(tmp_path), NBYTES)
    yield made
    made.close()


ENGINES = [(kind, depth, chunk) for kind in disk.KINDS for depth, chunk in ((1, 64 << 10), (4, 256 << 10))]


@pytest.fixture(params=ENGINES, ids=str)
def engine(request: pytest.FixtureRequest):
    kind, depth, chunk = request.param
    if kind not in available_kinds():
        pytest.skip("io_uring is not permitted here")
    writer, reader = open_writer(kind, depth, chunk), open_reader(kind, depth, chunk)
    yield writer, reader
    writer.close()
    reader.close()


def content(file: SpillFile) -> bytes:
    """Of the whole file, through a descriptor without O_DIRECT."""
    fd = os.open(file.path, os.O_RDONLY)
    try:
        return os.pread(fd, NBYTES, 0)
    finally:
        os.close(fd)


def test_what_is_written_is_read_back_and_its_neighbours_stay(engine, file: SpillFile) -> None:
    """Pieces of any size and address, gathered; zeros up to the end of the last page."""
    writer, reader = engine
    chance, memory, ends = random.Random(3), Memory(8 << 20), Ends()
    expected, page, count = bytearray(NBYTES), 0, 0
    while page < NBYTES // PAGE - 250:
        some = [0, 1, 64, 1000, PAGE, 3 * PAGE, 70_000, 200_000]
        sizes = [chance.choice(some) for _ in range(chance.choice([1, 1, 5]))]
        pieces, data = [], b""
        for size in sizes:
            at = chance.randrange(len(memory.map) - size)
            at = at // PAGE * PAGE if chance.random() < 0.5 else at
            pieces.append((memory.address + at, size))
            data += memory.map[at : at + size]
        nbytes = whole_pages(len(data)) + chance.choice([0, 0, PAGE])
        expected[page * PAGE : page * PAGE + len(data)] = data
        writer.write(file, Write(page * PAGE, nbytes, tuple(pieces), ends.of(count)))
        count, page = count + 1, page + nbytes // PAGE + chance.choice([0, 1])
    assert count > 10 and set(ends.wait(count).values()) == {None}
    assert content(file) == bytes(expected)
    back = Memory(NBYTES, seed=1)
    reader.submit(Read(file.path, 0, NBYTES, back.address, 0, 0, ends.of(-1)))
    assert ends.wait(count + 1)[-1] is None
    assert back.map[:] == bytes(expected)


def test_nothing_that_was_written_or_read_stays_in_the_page_cache(engine, file: SpillFile, tmp_path: Path) -> None:
    if in_page_cache_filesystem(tmp_path):
        pytest.skip("the file system is the page cache")
    writer, reader = engine
    memory, ends = Memory(NBYTES), Ends()
    for i in range(8):
        part = NBYTES // 8
        writer.write(file, Write(i * part, part, ((memory.address + i * part + i % 2 * 64, part - 64),), ends.of(i)))
    ends.wait(8)
    assert cached_nbytes(file.fd) == 0
    reader.submit(Read(file.path, 0, NBYTES, memory.address, 0, 0, ends.of(9)))
    ends.wait(9)
    reader.close()
    assert cached_nbytes(file.fd) == 0


def test_a_file_system_without_direct_writes_is_brought_to_the_disk_and_dropped(
    engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_page_cache_filesystem(tmp_path):
        pytest.skip("the file system is the page cache")
    opened = os.open

    def refuse(path, flags, *rest, **named):
        if flags & os.O_DIRECT and flags & os.O_RDWR:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    writer, _ = engine
    for sync in ("range", "data"):
        file = SpillFile("cache", str(tmp_path), NBYTES)
        assert not file.direct
        memory, ends = Memory(NBYTES), Ends()
        if sync == "data":
            monkeypatch.setattr(spill_file, "_sync_range", None)
        writer.write(file, Write(0, NBYTES, ((memory.address + 1, NBYTES - 1),), ends.of(0)))
        assert ends.wait(1) == {0: None}
        assert cached_nbytes(file.fd) == 0
        assert content(file) == memory.map[1:] + b"\0"
        file.close()


def test_a_prepared_write_is_queued_as_often_as_it_is_called(engine, file: SpillFile) -> None:
    writer, _ = engine
    memory, ended = Memory(PAGE), threading.Semaphore(0)
    queue = writer.prepare_write(file, Write(PAGE, PAGE, ((memory.address, PAGE),), lambda error: ended.release()))
    for times in range(3):
        memory.map[:] = bytes([times]) * PAGE
        queue()
        assert ended.acquire(timeout=30)
        assert content(file)[PAGE : 2 * PAGE] == bytes([times]) * PAGE
    writer.close()
    with pytest.raises(RuntimeError, match="closed"):
        queue()


@pytest.mark.parametrize("write", [
    Write(1, PAGE, (), print), Write(0, 100, (), print), Write(NBYTES, PAGE, (), print), Write(-PAGE, PAGE, (), print),
    Write(0, PAGE, ((0, PAGE + 1),), print), Write(0, 2 * NBYTES, (), print),
])
def test_a_write_is_of_whole_pages_of_its_file(file: SpillFile, write: Write) -> None:
    writer = open_writer("direct")
    with pytest.raises(ValueError, match="whole pages within the file"):
        writer.prepare_write(file, write)
    writer.close()


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5 * PAGE), st.integers(0, 40 * PAGE)), min_size=1, max_size=6),
       st.sampled_from([PAGE, 8 * PAGE, 64 * PAGE]), st.sampled_from([PAGE, 3 * PAGE, 64 * PAGE]), st.booleans(),
       st.integers(0, 2))
def test_chunks_of_a_write_cover_it_once_in_order(
    pieces: list[tuple[int, int]], chunk: int, bounce: int, direct: bool, spare: int
) -> None:
    """Against a byte-by-byte picture: which source byte lands where, zeros (-1) behind."""
    pieces = [(1 << 30 | address, nbytes) for address, nbytes in pieces]
    data = np.concatenate([np.arange(address, address + nbytes) for address, nbytes in pieces])
    nbytes = whole_pages(len(data)) + spare * PAGE
    at, found = 7 * PAGE, [np.empty(0, np.int64)]
    for chunk_ in split_write(Write(at, nbytes, tuple(pieces), print), direct, chunk, bounce):
        assert chunk_.offset == at and chunk_.nbytes == chunk_.need and chunk_.nbytes % PAGE == 0 < chunk_.nbytes
        if chunk_.head:
            assert chunk_.head == chunk_.nbytes <= bounce and not chunk_.tail
            landed = np.full(chunk_.nbytes, -1)
            for to, source, size in chunk_.copies:
                assert 0 <= to <= to + size <= chunk_.nbytes
                landed[to : to + size] = np.arange(source, source + size)
        else:
            assert not chunk_.copies and not (direct and chunk_.address % PAGE)
            assert chunk_.nbytes <= max(chunk, PAGE if len(pieces) == 1 else GATHER_NBYTES)
            landed = np.arange(chunk_.address, chunk_.address + chunk_.nbytes)
        found, at = [*found, landed], at + chunk_.nbytes
    assert np.array_equal(np.concatenate(found), np.concatenate((data, np.full(nbytes - len(data), -1))))


def test_short_writes_and_interrupts_are_gone_on_with(file: SpillFile, monkeypatch: pytest.MonkeyPatch) -> None:
    wrote, chance = os.pwritev, random.Random(0)

    def some(fd: int, buffers: list, offset: int) -> int:
        whole = b"".join(bytes(b) for b in buffers)
        keep = max(PAGE, len(whole) // PAGE // 2 * PAGE)
        memory = Memory(keep)
        memory.map[:] = whole[:keep]
        return wrote(fd, [memory.map], offset) if chance.random() < 0.9 else wrote(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", some)
    memory, ends, writer = Memory(NBYTES), Ends(), open_writer("direct", 2, 64 * PAGE)
    writer.write(file, Write(0, NBYTES, ((memory.address, NBYTES),), ends.of(0)))
    assert ends.wait(1) == {0: None} and content(file) == memory.map[:]
    writer.close()


@pytest.mark.parametrize("fault", [errno.EIO, errno.ENOSPC, 0, 100])
def test_a_write_that_fails_ends_with_its_error(file: SpillFile, monkeypatch: pytest.MonkeyPatch, fault: int) -> None:
    """And others do not: errors of the disk, and one that takes nothing, or part of a page."""
    wrote = os.pwritev

    def fail(fd: int, buffers: list, offset: int) -> int:
        if offset < 8 * PAGE:
            return wrote(fd, buffers, offset)
        if fault in (errno.EIO, errno.ENOSPC):
            raise OSError(fault, os.strerror(fault))
        return fault

    monkeypatch.setattr(os, "pwritev", fail)
    memory, ends, writer = Memory(16 * PAGE), Ends(), open_writer("direct", 2, 4 * PAGE)
    for i in range(2):
        writer.write(file, Write(8 * i * PAGE, 8 * PAGE, ((memory.address, 8 * PAGE),), ends.of(i)))
    found = ends.wait(2)
    error = found[1]
    assert found[0] is None and isinstance(error, OSError)
    assert error.errno == (fault if fault in (errno.EIO, errno.ENOSPC) else errno.EIO)
    writer.close()


def test_io_uring_tells_of_a_write_that_fails(tmp_path: Path) -> None:
    """A descriptor that may not be written, as the disk's errors cannot be made here."""
    if "uring" not in available_kinds():
        pytest.skip("io_uring is not permitted here")
    file, memory, ends, writer = SpillFile("cache", str(tmp_path), NBYTES), Memory(PAGE), Ends(), open_writer("uring")
    writable, file.fd = file.fd, os.open(file.path, os.O_RDONLY)
    writer.write(file, Write(0, PAGE, ((memory.address, PAGE),), ends.of(0)))
    error = ends.wait(1)[0]
    assert isinstance(error, OSError) and error.errno == errno.EBADF and error.filename == "cache"
    writer.close()
    os.close(writable)
    file.close()


def test_closing_ends_what_was_not_begun(file: SpillFile, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, wrote = threading.Event(), os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *a: (gate.wait(30), wrote(*a))[1])
    memory, ends, writer = Memory(PAGE), Ends(), open_writer("direct", 1)
    for i in range(3):
        writer.write(file, Write(i * PAGE, PAGE, ((memory.address, PAGE),), ends.of(i)))
    threading.Timer(0.05, gate.set).start()
    writer.close()
    found = ends.wait(3)
    assert isinstance(found[2], ReaderClosedError)
    assert os.fstat(file.fd).st_size == NBYTES, "the file stays open"


def test_space_is_taken_at_once_or_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SpillFile("cache", str(tmp_path), 8 << 20)
    assert os.fstat(file.fd).st_blocks * 512 >= 8 << 20 and list(tmp_path.iterdir()) == []
    file.close()
    before = len(os.listdir("/proc/self/fd"))

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SpillError, match=r"8388608 bytes of the spill file cache \(No space left .*; free") as e:
        SpillFile("cache", str(tmp_path), 8 << 20)
    assert "\n" not in str(e.value) and list(tmp_path.iterdir()) == []
    with pytest.raises(SpillError, match="no spill file can be made here"):
        SpillFile("cache", str(tmp_path / "absent"), 8)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_system_without_nameless_files_gets_one_that_is_unlinked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path, flags, *rest, **named):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return opened(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    file = SpillFile("cache", str(tmp_path), NBYTES)
    assert list(tmp_path.iterdir()) == [] and os.fstat(file.fd).st_nlink == 0
    assert content(file) == bytes(NBYTES)
    file.close()


@pytest.fixture
def no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor's path opens its file."""
    real = os.open

    def refuse(path, flags, *rest, **named):
        if str(path).startswith("/proc/"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)


def test_without_proc_a_file_has_a_name_until_it_is_closed(tmp_path: Path, no_proc: None) -> None:
    before = len(os.listdir("/proc/self/fd"))
    file = SpillFile("cache", str(tmp_path), NBYTES)
    other = SpillFile("cache", str(tmp_path), NBYTES)
    assert sorted(tmp_path.iterdir()) == sorted(Path(f.path) for f in (file, other))
    memory, ends, writer, reader = Memory(2 * PAGE), Ends(), open_writer("direct", 1), open_reader("direct", 1)
    writer.write(file, Write(PAGE, PAGE, ((memory.address, PAGE),), ends.of(0)))
    assert ends.wait(1)[0] is None
    reader.submit(Read(file.path, PAGE, PAGE, memory.address + PAGE, 0, 0, ends.of(1)))
    assert ends.wait(2)[1] is None and memory.map[PAGE:] == memory.map[:PAGE]
    writer.close()
    reader.close()
    file.close()
    assert [str(left) for left in tmp_path.iterdir()] == [other.path]
    os.close(other.fd)
    del other  # its owner forgot to close it
    assert list(tmp_path.iterdir()) == [] and len(os.listdir("/proc/self/fd")) == before


def test_a_named_file_that_a_killed_process_left_is_removed(tmp_path: Path, no_proc: None) -> None:
    living = SpillFile("cache", str(tmp_path), PAGE)
    (tmp_path / f"{spill_file.NAMED}left").write_bytes(b"of another process")
    file = SpillFile("cache", str(tmp_path), PAGE)
    assert {str(path) for path in tmp_path.iterdir()} == {living.path, file.path}
    for made in (living, file):
        made.close()
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, sys, mmap, ctypes
from forebay.runtime.disk.chunks import Write
from forebay.runtime.disk.spill import SpillSpace
space = SpillSpace(sys.argv[1])
space.open({"cache": 8 << 20, "hidden": 4096})
memory = mmap.mmap(-1, 8 << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
while True:
    space.writer.write(space["cache"], Write(0, 8 << 20, ((address, 8 << 20),), lambda error: None))
    print("writing", flush=True)
"""


def test_a_killed_process_leaves_no_spill_file(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    assert list(tmp_path.iterdir()) == []
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_programs_share_a_file_by_its_name(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    space = SpillSpace(str(tmp_path / "new"))
    space.open({"cache": NBYTES})
    first = space["cache"]
    space.open({"cache": NBYTES, "hidden": PAGE})
    assert space["cache"] is first and "hidden" in space
    with pytest.raises(SpillError, match="cache has 2097152 bytes, and a program means 8192"):
        space.open({"cache": 2 * PAGE})
    space.close()
    space.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_is_tried_before_anything_spills(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (None, str(tmp_path), str(tmp_path / "not" / "yet")):
        require_spill_folder(folder)
    for folder in ("file", "file/below", "file/far/below"):
        with pytest.raises(SpillError, match=f"^{tmp_path / folder}: no spill file can be made here .Not a directory"):
            require_spill_folder(str(tmp_path / folder))
    assert {path.name for path in tmp_path.iterdir()} == {"file"}
