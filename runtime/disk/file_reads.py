"""The reads that a slice of files takes: one, or one for each run of bytes that lies in another file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forebay.rewriter.ir.program import FileSlice
from forebay.runtime.disk.chunks import OnDone, Read
from forebay.runtime.disk.reader import DiskReader
from forebay.runtime.disk.together import Together


def reads_of(src: FileSlice, address: int, room: tuple[int, int], on_done: OnDone) -> list[Read]:
    """The reads that bring a slice to `address`; `on_done` is called once all of them have ended, with the first error.

    They may be issued again once it has been called.
    """
    runs = list(src.by_file())
    if len(runs) == 1:
        ((_, run),) = runs
        return [Read(run.path, run.offset, run.nbytes, address, *room, on_done, run.bands)]
    done = Together(len(runs), on_done).part
    return [Read(run.path, run.offset, run.nbytes, address + at, 0, 0, done, run.bands) for at, run in runs]


def prepared(reader: DiskReader, reads: Sequence[Read]) -> Callable[[], None]:
    """A call that queues all of the reads."""
    calls = [reader.prepare(read) for read in reads]
    if len(calls) == 1:
        return calls[0]

    def queue() -> None:
        for call in calls:
            call()

    return queue
