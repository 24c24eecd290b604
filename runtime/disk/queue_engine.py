"""Shared code of engines with one queue of chunks: submission of reads and writes, faults, shutdown."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

from forebay.runtime.disk.chunk_queue import ChunkQueue, Task
from forebay.runtime.disk.chunks import OnDone, Read, Write
from forebay.runtime.disk.spill_file import SpillFile


class QueueEngine:
    """A `DiskReader` and `DiskWriter` whose threads take chunks from a queue."""

    def __init__(self, queue: ChunkQueue) -> None:
        self._queue = queue
        self._threads: list[threading.Thread] = []

    def prepare(self, read: Read) -> Callable[[], None]:
        """Make the read ready; see `DiskReader`."""
        return functools.partial(self._put, self._queue.read_task(read))

    def submit(self, read: Read) -> None:
        """Queue the read; see `DiskReader`."""
        self._put(self._queue.read_task(read))

    def prepare_write(self, file: SpillFile, write: Write) -> Callable[[], None]:
        """Make the write ready; see `DiskWriter`."""
        return functools.partial(self._put, self._queue.write_task(file, write))

    def write(self, file: SpillFile, write: Write) -> None:
        """Queue the write; see `DiskWriter`."""
        self._put(self._queue.write_task(file, write))

    def read_rows(
        self, path: str, offset: int, row_nbytes: int, rows: Sequence[int], address: int, on_done: OnDone
    ) -> None:
        """Queue the gather; see `DiskReader`."""
        self._put(self._queue.rows_task(path, offset, row_nbytes, rows, address, on_done))

    def _put(self, task: Task) -> None:
        self._queue.put(task)
        self._wake()

    def _wake(self) -> None:
        """Tell threads that wait for something else than the queue."""

    def fault(self) -> BaseException | None:
        """The error that ended a thread; see `DiskReader`."""
        if self._queue.error is None and not self._queue.closed and not all(t.is_alive() for t in self._threads):
            return RuntimeError("a thread that reads the disk has ended")
        return self._queue.error

    def close(self) -> None:
        """End all reads and threads; idempotent, and waits for no thread when called from `on_done`."""
        self._queue.close()
        self._wake()
        if threading.current_thread() in self._threads:
            return
        for thread in self._threads:
            thread.join()
        self._queue.close_files()
