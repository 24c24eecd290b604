"""Measure direct writes to a spill file: by size, and what writing and reading the disk do to each other."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from forebay.rewriter.machine.both_ways import BothWays
from forebay.rewriter.machine.profile import Link
from forebay.runtime.disk.chunks import Write
from forebay.runtime.disk.reader import DiskWriter, available_kinds, open_writer
from forebay.runtime.disk.spill_file import SpillFile
from forebay.runtime.measure.contention import ReadFlow
from forebay.runtime.measure.flow import Flow
from forebay.runtime.measure.kernels import MIB
from forebay.runtime.measure.steady import settled_rate, steady_link
from forebay.runtime.run.arena import Arena

FILE_NBYTES = 64 * MIB
LINK_NBYTES = (64 << 10, 256 << 10, MIB, 4 * MIB, 16 * MIB)  # of the writes that the link is fitted to
BOTH_NBYTES = (64 << 10, MIB, 4 * MIB)  # of those that stand beside reads
TURN_S = 0.08
QUICK_TURN_S = 0.01
IN_FLIGHT = 4  # writes at once, as stores of a block's micro-batches are
# (engine, depth, chunk nbytes) worth trying
CANDIDATES = (("direct", 2, MIB), ("uring", 4, MIB), ("direct", 4, 4 * MIB))


def measure_writes(
    folder: str, near: str, path: str, nbytes: int, read: Link, memory: Arena, quick: bool
) -> tuple[Link, tuple[BothWays, ...]]:
    """The link `near` -> disk, and what writes of each size do to reads of the file at `path` and these to them.

    Takes 64 MiB of the disk of `folder` for a file without a name. Raises SpillError where it cannot be had.
    """
    with contextlib.closing(SpillFile("measured", folder, FILE_NBYTES)) as file:
        _fill(file, memory)
        best, rate = ("direct", 1, MIB), 0.0
        for candidate in (c for c in CANDIDATES[: 2 if quick else None] if c[0] in available_kinds()):
            with _flow(file, candidate, memory, 16 * MIB) as flow:
                found = settled_rate(_rates(flow, QUICK_TURN_S, 2) if quick else _rates(flow, 0.1, 5))
            if found > rate:
                best, rate = candidate, found
        with contextlib.closing(open_writer(*best)) as writer:
            sizes, rounds, tries = (LINK_NBYTES[:-1], 3, 1) if quick else (LINK_NBYTES, 11, None)
            bandwidth, latency, r2 = steady_link(sizes, rounds, lambda size, turn: _write_s(
                writer, file, memory, size, turn), tries)
        reads = ReadFlow(path, nbytes, read, memory)
        with contextlib.closing(reads.reader):
            both = tuple(_both_ways(file, best, memory, size, reads, quick) for size in BOTH_NBYTES)
    return Link(near, "disk", bandwidth, latency, *best, r2), both


class _WriteFlow(Flow):
    """Writes to a spill file from `memory`, IN_FLIGHT of them."""

    def __init__(self, file: SpillFile, writer: DiskWriter, memory: Arena, nbytes: int) -> None:
        self.file, self.writer, self.memory = file, writer, memory
        super().__init__(nbytes, FILE_NBYTES, IN_FLIGHT, writer.fault)

    def send(self, at: int) -> None:
        self.writer.write(self.file, Write(at, self.nbytes, ((self.memory.address, self.nbytes),), self.on_done))


@contextlib.contextmanager
def _flow(file: SpillFile, engine: tuple[str, int, int], memory: Arena, nbytes: int) -> Iterator[_WriteFlow]:
    with contextlib.closing(open_writer(*engine)) as writer:
        yield _WriteFlow(file, writer, memory, nbytes)


def _rates(flow: Flow, turn_s: float, turns: int) -> list[float]:
    found = []
    for _ in range(turns):
        flow.start()
        time.sleep(turn_s)
        found.append(flow.stop())
    return found


def _both_ways(
    file: SpillFile, engine: tuple[str, int, int], memory: Arena, nbytes: int, reads: ReadFlow, quick: bool
) -> BothWays:
    """Rates alone over rates side by side, taken in turns."""
    alone: tuple[list[float], list[float]] = [], []
    beside: tuple[list[float], list[float]] = [], []
    turns, turn_s = (1, QUICK_TURN_S) if quick else (9, TURN_S)
    with _flow(file, engine, memory, nbytes) as writes:
        for _ in range(turns):
            alone[0].extend(_rates(writes, turn_s, 1))
            alone[1].extend(_rates(reads, turn_s, 1))
            reads.start()
            writes.start()
            time.sleep(turn_s)
            beside[0].append(writes.stop())
            beside[1].append(reads.stop())
    return BothWays(nbytes, *(max(1.0, settled_rate(a) / settled_rate(b)) for a, b in zip(alone, beside, strict=True)))


def _fill(file: SpillFile, memory: Arena) -> None:
    """Write the file once, of bytes that no disk compresses: space that was only promised is slower to write."""
    block = os.urandom(16 * MIB)
    memory.bytes[: len(block)].numpy()[:] = memoryview(block)
    with contextlib.closing(open_writer("direct")) as writer:
        for at in range(0, FILE_NBYTES, len(block)):
            _write_s(writer, file, memory, len(block), at // len(block))


def _write_s(writer: DiskWriter, file: SpillFile, memory: Arena, nbytes: int, turn: int) -> float:
    """Seconds of one write, with nothing else in flight; raises its error."""
    ended, errors = threading.Event(), list[BaseException | None]()

    def done(error: BaseException | None) -> None:
        errors.append(error)
        ended.set()

    start = time.perf_counter()
    writer.write(file, Write(turn * nbytes % FILE_NBYTES, nbytes, ((memory.address, nbytes),), done))
    ended.wait()
    time_s = time.perf_counter() - start
    if errors[0] is not None:
        raise errors[0]
    return time_s
