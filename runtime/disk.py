"""Asynchronous disk reads straight into memory: the interface, the alignment arithmetic, and the choice of engine.

Three engines run the same queue of chunks (Linux only): `direct` (threads, O_DIRECT), `buffered` (threads, pages
dropped after use) and `uring` (io_uring, O_DIRECT). Files on tmpfs are the page cache themselves: O_DIRECT is refused
there, reads fall back to buffered, and nothing can be dropped.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from forebay.runtime.page_cache import cached_nbytes

PAGE_NBYTES = 4096  # O_DIRECT wants file offset, length and address aligned to the logical block: 512 or 4096
BOUNCE_NBYTES = 4 << 20  # aligned memory one reader takes for edges and incongruent reads, shared out over its depth
SETTLE_TRIES = 20  # of 1 ms: a read-ahead window of 16 MiB takes 4 ms from a fast disk; pages mapped elsewhere stay
MAX_DEPTH = 64  # keeps each in-flight chunk's share of the bounce memory at 64 KiB or more
KINDS = ("direct", "buffered", "uring")
# (depth, chunk nbytes) that saturated an NVMe disk of 4.5 GB/s; the machine profile measures its own.
DEFAULTS = {"direct": (2, 4 << 20), "buffered": (1, 4 << 20), "uring": (4, 2 << 20)}

OnDone = Callable[[BaseException | None], None]


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes [offset, offset + nbytes) of the file `path`, to be placed at the pointer `address`.

    `room_before` and `room_after` are bytes around the destination that may be overwritten with anything; no other
    read in flight may have them as its destination. A read whose address is congruent to its offset modulo
    `PAGE_NBYTES` lands without a copy; 4095 bytes of room either side save its edge pages the copy too.
    `on_done` is called exactly once, from an engine's thread, with None after the last byte has landed or with the
    error after the last write to memory; it must be quick, because the engine issues nothing meanwhile.
    """

    path: str
    offset: int
    nbytes: int
    address: int
    room_before: int
    room_after: int
    on_done: OnDone


class DiskReader(Protocol):
    """Reads run in the order of submission with several in flight, across the borders of reads; none stay cached.

    Files are opened once and stay open until `close`; pages another process maps are out of reach and stay cached.
    """

    def submit(self, read: Read) -> None:
        """Queue the read and return at once; raises RuntimeError after `close`."""

    def read_rows(
        self, path: str, offset: int, row_nbytes: int, rows: Sequence[int], address: int, on_done: OnDone
    ) -> None:
        """Gather `rows` of the table at `offset` to `address`, one after the other; a repeated row is read once."""

    def close(self) -> None:
        """Wait for the chunks in flight, end every other read with `ReaderClosedError`, close the files."""


class TruncatedFileError(OSError):
    """The file ends before the bytes that were asked for."""


class ReaderClosedError(RuntimeError):
    """The reader was closed before this read was complete."""


class Chunk(NamedTuple):
    """One request to the kernel: `nbytes` from `offset`, of which the first `need` must arrive.

    The leading `head` and trailing `tail` bytes land in the bounce buffer (tail after head), those between at
    `address`; `copies` are then made as (offset in bounce buffer, destination address, nbytes).
    """

    offset: int
    nbytes: int
    need: int
    head: int
    tail: int
    address: int
    copies: tuple[tuple[int, int, int], ...]


def page_floor(n: int) -> int:
    """The last multiple of the page size that is not above `n`."""
    return n // PAGE_NBYTES * PAGE_NBYTES


def page_ceil(n: int) -> int:
    """The first multiple of the page size that is not below `n`."""
    return -(-n // PAGE_NBYTES) * PAGE_NBYTES


def split_read(read: Read, direct: bool, chunk_nbytes: int, bounce_nbytes: int) -> list[Chunk]:
    """Cut a read into chunks of nearly equal size in file order, page-aligned in every way when `direct`."""
    wanted_end = read.offset + read.nbytes
    start, end = read.offset, wanted_end
    congruent = not direct or (read.address - read.offset) % PAGE_NBYTES == 0
    step = max(page_floor(chunk_nbytes if congruent else min(chunk_nbytes, bounce_nbytes)), PAGE_NBYTES)
    if direct:
        start, end = page_floor(start), page_ceil(end)
    if read.nbytes == 0:
        return []
    step = min(page_ceil(-(-(end - start) // -(-(end - start) // step))), step)
    to_memory = read.address - read.offset
    chunks = []
    for pos in range(start, end, step):
        stop = min(pos + step, end)
        low, high = max(pos, read.offset), min(stop, wanted_end)
        head = 0 if low - pos <= read.room_before else PAGE_NBYTES
        tail = 0 if stop - high <= read.room_after else PAGE_NBYTES
        if not congruent or 0 < head + tail >= stop - pos:
            head, tail = stop - pos, 0
        copies: tuple[tuple[int, int, int], ...] = ()
        if head:
            copies += ((low - pos, low + to_memory, min(high, pos + head) - low),)
        if tail:
            copies += ((head, stop - tail + to_memory, high - (stop - tail)),)
        chunks.append(Chunk(pos, stop - pos, high - pos, head, tail, pos + head + to_memory, copies))
    return chunks


def split_rows(offset: int, row_nbytes: int, rows: Sequence[int], address: int, bounce_nbytes: int) -> list[Chunk]:
    """Cut a gather into page-aligned chunks in file order: rows on touching pages share one, repeats are copied."""
    places: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        places.setdefault(row, []).append(address + index * row_nbytes)
    chunks: list[Chunk] = []
    limit = page_floor(bounce_nbytes)
    pos, stop, need = 0, 0, 0
    copies: list[tuple[int, int, int]] = []
    for row in sorted(places):
        low, row_end = offset + row * row_nbytes, offset + (row + 1) * row_nbytes
        while low < row_end:
            if not copies or page_floor(low) > stop or low >= pos + limit:
                if copies:
                    chunks.append(Chunk(pos, stop - pos, need, stop - pos, 0, 0, tuple(copies)))
                pos, copies = page_floor(low), []
            high = min(row_end, pos + limit)
            stop, need = page_ceil(high), high - pos
            done = low - (offset + row * row_nbytes)
            copies += [(low - pos, place + done, high - low) for place in places[row]]
            low = high
    if copies:
        chunks.append(Chunk(pos, stop - pos, need, stop - pos, 0, 0, tuple(copies)))
    return chunks


def pieces(chunk: Chunk, bounce_address: int, got: int) -> list[tuple[int, int]]:
    """The (address, nbytes) list that receives what is left of a chunk after its first `got` bytes."""
    if chunk.head == chunk.tail == 0:
        return [(chunk.address + got, chunk.nbytes - got)]
    left = []
    middle = (chunk.address, chunk.nbytes - chunk.head - chunk.tail)
    for start, nbytes in ((bounce_address, chunk.head), middle, (bounce_address + chunk.head, chunk.tail)):
        skip = min(got, nbytes)
        got -= skip
        if nbytes > skip:
            left.append((start + skip, nbytes - skip))
    return left


_memmove = ctypes.CDLL(None).memmove  # lets other Python threads run meanwhile, unlike ctypes.memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = ctypes.c_void_p


def copy_out(chunk: Chunk, bounce_address: int) -> None:
    """Copy what a chunk left in the bounce buffer to its destinations."""
    for source, destination, nbytes in chunk.copies:
        # Below 64 KiB (some 5 us) giving up the interpreter lock costs more than holding it.
        (_memmove if nbytes > 65536 else ctypes.memmove)(destination, bounce_address + source, nbytes)


class OpenFile:
    """An open file; `direct` says whether O_DIRECT holds, `stale` that read-ahead may have left pages behind."""

    __slots__ = ("direct", "fd", "path", "stale")

    def __init__(self, path: str, direct: bool) -> None:
        self.path, self.stale = path, False
        self.fd = _open_direct(path) if direct else -1
        self.direct = self.fd >= 0
        if not self.direct:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.drop(0)

    def drop(self, end: int) -> None:
        """Drop the pages up to `end`, the page that holds it too; 0 drops the whole file.

        Always from the start of the file: a folio of many pages is dropped only by a range that holds all of it.
        """
        with contextlib.suppress(OSError):  # a file system without the advice has nothing better to offer
            os.posix_fadvise(self.fd, 0, page_ceil(end), os.POSIX_FADV_DONTNEED)

    def truncated(self, job: Job) -> TruncatedFileError:
        size = os.fstat(self.fd).st_size
        return TruncatedFileError(
            f"{self.path}: truncated: expected {job.nbytes} bytes at offset {job.offset}, but the file holds {size} "
            f"bytes; fetch or convert the checkpoint again"
        )


def _open_direct(path: str) -> int:
    """A descriptor that is seen to read with O_DIRECT, or -1 where the file system refuses it."""
    fd = -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        with mmap.mmap(-1, PAGE_NBYTES) as page:
            os.preadv(fd, [page], 0)  # some file systems accept the flag and refuse the read
        return fd
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return -1
        raise


class Job:
    """One submitted read on its way: chunks not yet issued, how many are in flight, the first error."""

    __slots__ = ("chunks", "error", "file", "flying", "nbytes", "offset", "on_done", "path", "split")

    def __init__(
        self, path: str, offset: int, nbytes: int, split: Callable[[bool], list[Chunk]], on_done: OnDone
    ) -> None:
        self.path, self.offset, self.nbytes, self.on_done = path, offset, nbytes, on_done
        self.split: Callable[[bool], list[Chunk]] | None = split  # None once the file is open and the job is split
        self.chunks: deque[Chunk] = deque()
        self.file: OpenFile | None = None
        self.flying = 0
        self.error: BaseException | None = None


class ChunkQueue:
    """The reads of one engine in the order of submission, handed out chunk by chunk; every job ends exactly once."""

    def __init__(self, direct: bool, chunk_nbytes: int, bounce_nbytes: int) -> None:
        self.direct, self.chunk_nbytes, self.bounce_nbytes = direct, chunk_nbytes, bounce_nbytes
        self.changed = threading.Condition(threading.Lock())
        self.jobs: deque[Job] = deque()
        self.closed = False
        self._files: dict[str, OpenFile] = {}

    def put_read(self, read: Read) -> None:
        if min(read.offset, read.nbytes, read.room_before, read.room_after) < 0:
            raise ValueError(f"{read.path}: offset, nbytes and room of a read must be >= 0: {read}")

        def split(direct: bool) -> list[Chunk]:
            return split_read(read, direct, self.chunk_nbytes, self.bounce_nbytes)

        self._put(Job(read.path, read.offset, read.nbytes, split, read.on_done))

    def put_rows(
        self, path: str, offset: int, row_nbytes: int, rows: Sequence[int], address: int, on_done: OnDone
    ) -> None:
        if row_nbytes <= 0 or offset < 0 or (len(rows) and min(rows) < 0):
            raise ValueError(f"{path}: read_rows needs offset and rows >= 0 and row_nbytes > 0")
        nbytes = (max(rows) + 1) * row_nbytes if len(rows) else 0

        def split(_: bool) -> list[Chunk]:
            return split_rows(offset, row_nbytes, rows, address, self.bounce_nbytes)

        self._put(Job(path, offset, nbytes, split, on_done))

    def _put(self, job: Job) -> None:
        with self.changed:
            if self.closed:
                raise RuntimeError("this disk reader is closed; open another with open_reader()")
            self.jobs.append(job)
            self.changed.notify_all()

    def take(self, wait: bool) -> tuple[Job, Chunk | None] | None:
        """The next chunk to issue; chunk None: the job has nothing to issue, `finish` it now; None: no job.

        With `wait` it blocks until there is a job, and gives None only when the queue is closed and empty.
        """
        with self.changed:
            while True:
                while self.jobs:
                    job = self.jobs[0]
                    self._begin(job)
                    if job.chunks:
                        job.flying += 1
                        chunk = job.chunks.popleft()
                        if not job.chunks:
                            self.jobs.popleft()
                        return job, chunk
                    self.jobs.popleft()
                    return job, None
                if not wait or self.closed:
                    return None
                self.changed.wait()

    def _begin(self, job: Job) -> None:
        if job.split is None:
            return
        split, job.split = job.split, None
        try:
            job.file = self._files.get(job.path) or self._files.setdefault(job.path, OpenFile(job.path, self.direct))
            job.chunks.extend(split(job.file.direct))
        except Exception as error:
            job.file, job.error = None, error

    def finish(self, job: Job, chunk: Chunk | None, error: BaseException | None) -> None:
        """Account for a chunk that landed or failed; when it was the job's last, call `on_done`."""
        with self.changed:
            job.flying -= chunk is not None
            if error is not None:
                job.error = job.error or error
                job.chunks.clear()
                if self.jobs and self.jobs[0] is job:
                    self.jobs.popleft()
            ended = job.flying == 0 and not job.chunks
            after = self.jobs[0] if self.jobs else None
        if job.file and not job.file.direct and chunk:
            # Read-ahead past the end of a read is of use only to a read that goes on from there.
            goes_on = not ended or (after and after.path == job.path and after.offset == job.offset + job.nbytes)
            job.file.stale = True
            job.file.drop(chunk.offset + chunk.nbytes if goes_on else 0)
        if ended:
            try:
                job.on_done(job.error)
            except BaseException:  # a faulty callback must not end the engine's thread and hang every other read
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))

    def close(self) -> None:
        """Let no further chunk be issued; jobs with nothing in flight are left for `take` to hand out for finishing."""
        with self.changed:
            self.closed = True
            for job in tuple(self.jobs):
                job.error = job.error or ReaderClosedError(f"{job.path}: the disk reader was closed before this read")
                job.chunks.clear()
                job.split = None
                if job.flying:
                    self.jobs.remove(job)  # `finish` ends it when the last chunk in flight lands
            self.changed.notify_all()

    def settle(self) -> None:
        """While there is no job, drop what read-ahead still brought in after the last buffered reads."""
        for file in tuple(self._files.values()):
            if file.stale:
                file.stale = False
                for _ in range(SETTLE_TRIES):  # pages still on their way from disk cannot be dropped
                    file.drop(0)
                    if not cached_nbytes(file.fd):
                        break
                    if self.jobs:
                        file.stale = True
                        return
                    time.sleep(0.001)

    def close_files(self) -> None:
        """Drop what buffered reads may have left and close the descriptors; only after the last chunk has landed."""
        self.settle()
        for file in self._files.values():
            os.close(file.fd)
        self._files.clear()


def available_kinds() -> tuple[str, ...]:
    """The engines that work in this process: io_uring may be missing or forbidden."""
    from forebay.runtime.disk_uring import uring_available

    return KINDS if uring_available() else KINDS[:2]


def open_reader(path_kind: str = "auto", depth: int | None = None, chunk_nbytes: int | None = None) -> DiskReader:
    """Start an engine with `depth` chunks of at most `chunk_nbytes` in flight; "auto" is "direct".

    Raises ValueError for an unknown kind, depth or chunk size, and OSError when io_uring is asked for and not allowed.
    """
    from forebay.runtime.disk_threads import ThreadReader
    from forebay.runtime.disk_uring import UringReader

    kind = "direct" if path_kind == "auto" else path_kind
    if kind not in KINDS:
        raise ValueError(f"unknown disk engine {path_kind!r}: choose auto, {', '.join(KINDS)}")
    depth = DEFAULTS[kind][0] if depth is None else depth
    chunk_nbytes = DEFAULTS[kind][1] if chunk_nbytes is None else chunk_nbytes
    if not 1 <= depth <= MAX_DEPTH:
        raise ValueError(f"depth must be within 1..{MAX_DEPTH}, is {depth}")
    if chunk_nbytes < PAGE_NBYTES:
        raise ValueError(f"chunk_nbytes must be at least {PAGE_NBYTES}, is {chunk_nbytes}")
    return UringReader(depth, chunk_nbytes) if kind == "uring" else ThreadReader(kind == "direct", depth, chunk_nbytes)
