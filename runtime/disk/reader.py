"""Asynchronous disk reads and writes straight from and to memory: the interface, the queue, the choice of engine.

Three engines run the same queue of chunks (Linux only): `direct` (threads, O_DIRECT), `buffered` (threads, pages
dropped after use) and `uring` (io_uring, O_DIRECT). A write goes as its spill file was opened. Files on tmpfs are the
page cache themselves: O_DIRECT is refused there, reads fall back to buffered, and nothing can be dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.runtime.disk.chunks import (
    OnDone,
    Read,
    Write,
)
from forebay.runtime.disk.spill_file import SpillFile
from forebay.runtime.disk.threads import ThreadEngine
from forebay.runtime.disk.uring import UringEngine, uring_available

MAX_DEPTH = 64  # keeps each in-flight chunk's share of the bounce memory at 64 KiB or more
KINDS = ("direct", "buffered", "uring")
# (depth, chunk nbytes) that saturated an NVMe disk of 4.5 GB/s; the machine profile measures its own.
DEFAULTS = {"direct": (2, 4 << 20), "buffered": (1, 4 << 20), "uring": (4, 2 << 20)}


def readers_beside() -> tuple[tuple[str, int], tuple[str, int]]:
    """Kind and depth of the readers of caches and of single rows beside that of weights. Single rows are many small
    reads, twice as fast with 32 in flight (71 ms for 2048 rows, 143 ms with 2); caches a run of blocks for each
    sequence, behind which a lookup waited 86 ms, and weights beside 32 in flight."""
    return (("uring", 8), ("uring", 32)) if "uring" in available_kinds() else (("direct", 2), ("direct", 8))


class DiskReader(Protocol):
    """Reads run in the order of submission with several in flight, across the borders of reads; none stay cached.

    Files are opened once and stay open until `close`; pages another process maps are out of reach and stay cached.
    """

    def prepare(self, read: Read) -> Callable[[], None]:
        """A call that queues the read and returns at once, each time anew: the read is cut into chunks only once. The
        call raises RuntimeError after `close`, ReaderBrokenError after a fault; ValueError here for a negative size."""

    def submit(self, read: Read) -> None:
        """Queue the read once."""

    def read_rows(
        self, path: str, offset: int, row_nbytes: int, rows: Sequence[int], address: int, on_done: OnDone
    ) -> None:
        """Gather `rows` of the table at `offset` to `address`, one after the other; a repeated row is read once."""

    def fault(self) -> BaseException | None:
        """The error that ended the engine's threads, after which no read completes; None while they live, or once the
        reader is closed."""

    def close(self) -> None:
        """Wait for the chunks in flight, end every other read with `ReaderClosedError`, close the files."""


class DiskWriter(Protocol):
    """Writes run with several in flight, from the order of submission on; what they wrote does not stay cached."""

    def prepare_write(self, file: SpillFile, write: Write) -> Callable[[], None]:
        """A call that queues the write and returns at once, each time anew, as a reader's `prepare`. ValueError here
        for a write that is not of whole pages within the file."""

    def write(self, file: SpillFile, write: Write) -> None:
        """Queue the write once."""

    def fault(self) -> BaseException | None:
        """See `DiskReader.fault`."""

    def close(self) -> None:
        """Close like a reader; files that were written stay open."""


def available_kinds() -> tuple[str, ...]:
    """The engines that work in this process: io_uring may be missing or forbidden."""
    return KINDS if uring_available() else KINDS[:2]


def open_writer(path_kind: str = "auto", depth: int | None = None, chunk_nbytes: int | None = None) -> DiskWriter:
    """Start an engine for writes, as `open_reader` does one for reads."""
    return _open_engine(path_kind, depth, chunk_nbytes)


def open_reader(path_kind: str = "auto", depth: int | None = None, chunk_nbytes: int | None = None) -> DiskReader:
    """Start an engine with `depth` chunks of at most `chunk_nbytes` in flight; "auto" is "direct".

    Raises ValueError for an unknown kind, depth or chunk size, and OSError when io_uring is asked for and not allowed.
    """
    return _open_engine(path_kind, depth, chunk_nbytes)


def _open_engine(path_kind: str, depth: int | None, chunk_nbytes: int | None) -> ThreadEngine | UringEngine:
    kind = "direct" if path_kind == "auto" else path_kind
    if kind not in KINDS:
        raise ValueError(f"unknown disk engine {path_kind!r}: choose auto, {', '.join(KINDS)}")
    depth = DEFAULTS[kind][0] if depth is None else depth
    chunk_nbytes = DEFAULTS[kind][1] if chunk_nbytes is None else chunk_nbytes
    if not 1 <= depth <= MAX_DEPTH:
        raise ValueError(f"depth must be within 1..{MAX_DEPTH}, is {depth}")
    if chunk_nbytes < PAGE_NBYTES:
        raise ValueError(f"chunk_nbytes must be at least {PAGE_NBYTES}, is {chunk_nbytes}")
    return UringEngine(depth, chunk_nbytes) if kind == "uring" else ThreadEngine(kind == "direct", depth, chunk_nbytes)
