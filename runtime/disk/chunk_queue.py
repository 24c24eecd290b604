"""The queue of chunks that every disk engine works through, in the order of submission."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.runtime.disk.chunks import (
    Chunk,
    OnDone,
    Read,
    Write,
    split_bands,
    split_read,
    split_rows,
    split_runs,
    split_write,
)
from forebay.runtime.disk.open_file import OpenFile
from forebay.runtime.disk.page_cache import cached_nbytes
from forebay.runtime.disk.spill_file import SpillFile

BOUNCE_NBYTES = 4 << 20  # aligned memory one reader takes for edges and incongruent reads, shared out over its depth


SETTLE_TRIES = 20  # of 1 ms: a read-ahead window of 16 MiB takes 4 ms from a fast disk; pages mapped elsewhere stay


class ReaderClosedError(RuntimeError):
    """The reader was closed before this read was complete."""


class ReaderBrokenError(RuntimeError):
    """A fault that was no read's own ended the reader; it has to be opened anew."""


def told_as(error: BaseException | None) -> BaseException | None:
    """Return the error for waiting callers: a ReaderBrokenError in place of the SystemExit that ended a thread, which
    would silently end their process."""
    return ReaderBrokenError("the disk reader's thread has ended") if isinstance(error, SystemExit) else error


class Task:
    """A read, or a write to `spill`, that may be submitted many times; `chunks` and `file` are known once the file has
    been opened."""

    __slots__ = ("chunks", "file", "nbytes", "offset", "on_done", "path", "spill", "split")

    def __init__(
        self, path: str, offset: int, nbytes: int, split: Callable[[bool], list[Chunk]], on_done: OnDone,
        spill: SpillFile | None = None,
    ) -> None:
        self.path, self.offset, self.nbytes, self.split, self.on_done = path, offset, nbytes, split, on_done
        self.chunks: list[Chunk] = []
        self.file: OpenFile | None = None
        self.spill = spill


class Job:
    """One queued task on its way: the chunk to issue next, where to stop, how many are in flight, the first error."""

    __slots__ = ("begun", "end", "error", "flying", "next", "task")

    def __init__(self, task: Task) -> None:
        self.task = task
        self.begun = False  # the file is open and the task is cut
        self.next = self.end = self.flying = 0
        self.error: BaseException | None = None

    @property
    def file(self) -> OpenFile | None:
        return self.task.file


class ChunkQueue:
    """The reads of one engine in the order of submission, handed out chunk by chunk; every job ends exactly once."""

    def __init__(self, direct: bool, chunk_nbytes: int, bounce_nbytes: int) -> None:
        self.direct, self.chunk_nbytes, self.bounce_nbytes = direct, chunk_nbytes, bounce_nbytes
        self.changed = threading.Condition(threading.Lock())
        self.jobs: deque[Job] = deque()
        self.closed = False
        self.error: BaseException | None = None  # what broke the engine off
        self.waiting = 0  # threads that wait for a job, or are about to
        self._files: dict[str, OpenFile] = {}

    def read_task(self, read: Read) -> Task:
        if min(read.offset, read.nbytes, read.room_before, read.room_after) < 0:
            raise ValueError(f"{read.path}: offset, nbytes and room of a read must be >= 0: {read}")

        def split(direct: bool) -> list[Chunk]:
            cut = split_bands if read.bands else split_runs if read.runs else split_read
            return cut(read, direct, self.chunk_nbytes, self.bounce_nbytes)

        return Task(read.path, read.offset, read.nbytes, split, read.on_done)

    def write_task(self, file: SpillFile, write: Write) -> Task:
        inside = 0 <= write.offset <= file.nbytes - write.nbytes
        full = 0 <= sum(nbytes for _, nbytes in write.pieces) <= write.nbytes
        if write.offset % PAGE_NBYTES or write.nbytes % PAGE_NBYTES or not inside or not full:
            raise ValueError(f"{file.name}: a write needs whole pages within the file of {file.nbytes} bytes: {write}")

        def split(direct: bool) -> list[Chunk]:
            return split_write(write, direct, self.chunk_nbytes, self.bounce_nbytes)

        return Task(file.name, write.offset, write.nbytes, split, write.on_done, file)

    def rows_task(
        self, path: str, offset: int, row_nbytes: int, rows: Sequence[int], address: int, on_done: OnDone
    ) -> Task:
        if row_nbytes <= 0 or offset < 0 or (len(rows) and min(rows) < 0):
            raise ValueError(f"{path}: read_rows needs offset and rows >= 0 and row_nbytes > 0")
        nbytes = (max(rows) + 1) * row_nbytes if len(rows) else 0

        def split(_: bool) -> list[Chunk]:
            return split_rows(offset, row_nbytes, rows, address, self.bounce_nbytes)

        return Task(path, offset, nbytes, split, on_done)

    def put(self, task: Task) -> None:
        """Queue the task. Takes no lock, which the engine's threads would contend for, unless one of them waits."""
        if not self.closed:
            job = Job(task)
            self.jobs.append(job)
            if not self.waiting and not self.closed:
                return
            with self.changed:
                self.changed.notify_all()
                if not self.closed or job not in self.jobs or job.error is not None:
                    return
                self.jobs.remove(job)  # closed meanwhile, and `close` has not seen it
        if self.error is not None:
            raise ReaderBrokenError(f"the disk reader broke off: {self.error}") from self.error
        raise RuntimeError("this disk reader is closed; open another with open_reader()")

    def take(self, wait: bool) -> tuple[Job, Chunk | None] | None:
        """The next chunk to issue; chunk None: the job has nothing to issue, `finish` it now; None: no job.

        With `wait` it blocks until there is a job, and gives None only when the queue is closed and empty.
        """
        with self.changed:
            while True:
                while self.jobs:
                    job = self.jobs[0]
                    self._begin(job)
                    if job.next < job.end:
                        job.flying += 1
                        chunk = job.task.chunks[job.next]
                        job.next += 1
                        if job.next == job.end:
                            self.jobs.popleft()
                        return job, chunk
                    self.jobs.popleft()
                    return job, None
                if not wait or self.closed:
                    return None
                self.waiting += 1
                if not self.jobs:  # looked at once more: `put` appends before it looks at `waiting`
                    self.changed.wait()
                self.waiting -= 1

    def _begin(self, job: Job) -> None:
        if job.begun:
            return
        job.begun, task = True, job.task
        if task.file is None:
            try:
                path = task.path
                file: OpenFile | None = task.spill or self._files.get(path)
                if file is None:
                    file = self._files[path] = OpenFile(path, self.direct)
                task.chunks, task.file = task.split(file.direct), file
            except Exception as error:
                job.error = error
        job.end = len(task.chunks)

    def finish(self, job: Job, chunk: Chunk | None, error: BaseException | None) -> None:
        """Account for a chunk that landed or failed; when it was the job's last, call `on_done`."""
        with self.changed:
            job.flying -= chunk is not None
            if error is not None:
                job.error = job.error or told_as(error)
                job.end = job.next
                if self.jobs and self.jobs[0] is job:
                    self.jobs.popleft()
            ended = job.flying == 0 and job.next == job.end
            after = self.jobs[0] if self.jobs else None
        if job.file and not job.file.direct and chunk and job.task.spill is None:
            # Read-ahead past the end of a read is of use only to a read that goes on from there.
            task, following = job.task, after.task if after else None
            goes_on = not ended or (
                following and following.path == task.path and following.offset == task.offset + task.nbytes)
            job.file.stale = True
            job.file.drop(chunk.offset + chunk.nbytes if goes_on else 0)
        if ended:
            try:
                job.task.on_done(job.error)
            except BaseException:  # a faulty callback must not end the engine's thread and hang every other read
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))

    def fail(self, error: BaseException) -> None:
        """A thread of the engine ends by `error`: so do all reads that are not in another's hands, and the engine."""
        self.error = self.error or told_as(error)
        self.close()
        while (taken := self.take(wait=False)) is not None:
            self.finish(*taken, None)

    def close(self) -> None:
        """Let no further chunk be issued; jobs with nothing in flight are left for `take` to hand out for finishing."""
        with self.changed:
            self.closed = True
            for job in tuple(self.jobs):
                job.error = job.error or self.error or ReaderClosedError(
                    f"{job.task.path}: the disk reader was closed before this read")
                job.begun, job.end = True, job.next
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
