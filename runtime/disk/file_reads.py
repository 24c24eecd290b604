"""The reads that a slice of files takes: one, or one for each run of bytes that lies in another file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from forebay.rewriter.ir.program import FileSlice
from forebay.runtime.disk.chunks import OnDone, Read
from forebay.runtime.disk.reader import DiskReader
from forebay.runtime.disk.together import Together


def submit_slice(reader: DiskReader, src: FileSlice, address: int, room: tuple[int, int], on_done: OnDone) -> None:
    """Bring a slice to `address`, once. Where it lies in one file and cannot be read, that is raised; `on_done` is
    called once all of its files were read, with the first error, that of a read that cannot be issued too."""
    reads, together = _reads(src, address, room, on_done)
    _issue([partial(reader.submit, read) for read in reads], together)


def prepare_slice(
    reader: DiskReader, src: FileSlice, address: int, room: tuple[int, int], on_done: OnDone
) -> Callable[[], None]:
    """A call that brings a slice to `address` as `submit_slice` does, again and again, once `on_done` was called."""
    reads, together = _reads(src, address, room, on_done)
    calls = [reader.prepare(read) for read in reads]
    return calls[0] if together is None else partial(_issue, calls, together)


def _reads(
    src: FileSlice, address: int, room: tuple[int, int], on_done: OnDone
) -> tuple[list[Read], Together | None]:
    """The reads of a slice, and who calls `on_done` where they are several."""
    runs = list(src.by_file())
    if len(runs) == 1:
        ((_, run),) = runs
        return [Read(run.path, run.offset, run.nbytes, address, *room, on_done, run.bands)], None
    together = Together(len(runs), on_done)
    return [Read(run.path, run.offset, run.nbytes, address + at, 0, 0, together.part, run.bands)
            for at, run in runs], together


def _issue(calls: list[Callable[[], None]], together: Together | None) -> None:
    if together is None:
        calls[0]()
    else:
        together.issue(calls)
