"""Disk reads and writes on a few threads, each blocked in preadv or pwritev with the interpreter lock released."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.runtime.disk.chunk_queue import BOUNCE_NBYTES, ChunkQueue, Job
from forebay.runtime.disk.chunks import Chunk, copy_in, copy_out, page_floor, pieces
from forebay.runtime.disk.queue_engine import QueueEngine


class ThreadEngine(QueueEngine):
    """`depth` threads take chunks in order and read them with O_DIRECT or through the page cache.

    Its bounce memory is at most `BOUNCE_NBYTES`, touched only by reads that need it.
    """

    def __init__(self, direct: bool, depth: int, chunk_nbytes: int) -> None:
        bounce_nbytes = page_floor(BOUNCE_NBYTES // depth)
        super().__init__(ChunkQueue(direct, chunk_nbytes, bounce_nbytes))
        bounces = [mmap.mmap(-1, bounce_nbytes) for _ in range(depth)]  # page-aligned, zero pages until written
        for i, bounce in enumerate(bounces):
            thread = threading.Thread(target=self._run, args=(bounce,), name=f"forebay-disk-{i}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system gives no more threads
                if not self._threads:
                    raise
                break  # fewer do the same work
            self._threads.append(thread)

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
