"""Disk reads and writes on a few threads, each blocked in preadv or pwritev with the interpreter lock released."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
from collections.abc import Callable, Sequence

from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.runtime.disk.chunk_queue import BOUNCE_NBYTES, ChunkQueue, Job
from forebay.runtime.disk.chunks import Chunk, OnDone, Read, Write, copy_in, copy_out, page_floor, pieces
from forebay.runtime.disk.spill_file import SpillFile


class ThreadEngine:
    """`depth` threads take chunks in order and read them with O_DIRECT or through the page cache.

    Its bounce memory is at most `BOUNCE_NBYTES`, touched only by reads that need it.
    """

    def __init__(self, direct: bool, depth: int, chunk_nbytes: int) -> None:
        bounce_nbytes = page_floor(BOUNCE_NBYTES // depth)
        self._queue = ChunkQueue(direct, chunk_nbytes, bounce_nbytes)
        bounces = [mmap.mmap(-1, bounce_nbytes) for _ in range(depth)]  # page-aligned, zero pages until written
        self._threads: list[threading.Thread] = []
        for i, bounce in enumerate(bounces):
            thread = threading.Thread(target=self._run, args=(bounce,), name=f"forebay-disk-{i}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system gives no more threads
                if not self._threads:
                    raise
                break  # fewer do the same work
            self._threads.append(thread)

    def prepare(self, read: Read) -> Callable[[], None]:
        """Make the read ready; see `DiskReader`."""
        return functools.partial(self._queue.put, self._queue.read_task(read))

    def submit(self, read: Read) -> None:
        """Queue the read; see `DiskReader`."""
        self.prepare(read)()

    def prepare_write(self, file: SpillFile, write: Write) -> Callable[[], None]:
        """Make the write ready; see `DiskWriter`."""
        return functools.partial(self._queue.put, self._queue.write_task(file, write))

    def write(self, file: SpillFile, write: Write) -> None:
        """Queue the write; see `DiskWriter`."""
        self.prepare_write(file, write)()

    def read_rows(
        self, path: str, offset: int, row_nbytes: int, rows: Sequence[int], address: int, on_done: OnDone
    ) -> None:
        """Queue the gather; see `DiskReader`."""
        self._queue.put(self._queue.rows_task(path, offset, row_nbytes, rows, address, on_done))

    def fault(self) -> BaseException | None:
        """What ended a thread; see `DiskReader`."""
        if self._queue.error is None and not self._queue.closed and not all(t.is_alive() for t in self._threads):
            return RuntimeError("a thread that reads the disk has ended")
        return self._queue.error

    def close(self) -> None:
        """End all reads and threads; idempotent, and waits for no thread when called from `on_done`."""
        self._queue.close()
        if threading.current_thread() in self._threads:
            return
        for thread in self._threads:
            thread.join()
        self._queue.close_files()

    def _run(self, bounce: mmap.mmap) -> None:
        try:
            self._serve(bounce)
        except BaseException as error:  # told to whoever waits; nobody would hear of it here
            self._queue.fail(error)

    def _serve(self, bounce: mmap.mmap) -> None:
        bounce_address = ctypes.addressof(ctypes.c_char.from_buffer(bounce))
        while True:
            taken = self._queue.take(wait=False)
            if taken is None:
                self._queue.settle()
                taken = self._queue.take(wait=True)
            if taken is None:
                return
            job, chunk = taken
            error: BaseException | None = None
            if chunk is not None:
                try:
                    (_read_chunk if job.task.spill is None else _write_chunk)(job, chunk, bounce_address)
                except BaseException as failure:
                    error = failure
                    if isinstance(failure, OSError) and failure.errno is not None and failure.filename is None:
                        failure.filename = job.task.path
            self._queue.finish(job, chunk, error)


def _read_chunk(job: Job, chunk: Chunk, bounce_address: int) -> None:
    """Read one chunk to the end, through partial results; raises TruncatedFileError at an early end of file."""
    file = job.file
    assert file is not None
    got = 0
    while got < chunk.need:
        buffers = [(ctypes.c_char * nbytes).from_address(start) for start, nbytes in pieces(chunk, bounce_address, got)]
        n = os.preadv(file.fd, buffers, chunk.offset + got)
        got += n
        if got < chunk.need and (n == 0 or (file.direct and n % PAGE_NBYTES)):
            raise file.truncated(job.task.offset, job.task.nbytes)
    copy_out(chunk, bounce_address)


def _write_chunk(job: Job, chunk: Chunk, bounce_address: int) -> None:
    """Write one chunk to the end, through partial results; raises OSError where the disk takes no more."""
    file = job.task.spill
    assert file is not None
    copy_in(chunk, bounce_address)
    put = 0
    while put < chunk.nbytes:
        buffers = [(ctypes.c_char * nbytes).from_address(start) for start, nbytes in pieces(chunk, bounce_address, put)]
        n = os.pwritev(file.fd, buffers, chunk.offset + put)
        put += n
        if put < chunk.nbytes and (n == 0 or (file.direct and n % PAGE_NBYTES)):
            raise file.took_part(chunk, put)
    file.settle(chunk.offset, chunk.nbytes)
