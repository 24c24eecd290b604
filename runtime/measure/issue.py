"""The time that a copy takes from the computing thread."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from statistics import median

import torch

from forebay.kernels.operator import Call
from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.ir.program import COMPUTE, DISK, Band, Copy, FileSlice, Record, Span, Wait
from forebay.runtime.devices.cpu.device import ThreadDevice
from forebay.runtime.disk.reader import DiskReader
from forebay.runtime.measure.kernels import GEMM_SHAPES, cold_products
from forebay.runtime.run.arena import Arena

ROWS = 8  # of x: a product takes longer than a third of a read's latency, so that no wait blocks
SLOTS = 4
SLICES = 10  # of a copy, as of ten experts
LAUNCHES = 32  # of a turn
QUICK_TURNS = 3


def issue_times_s(reader: DiskReader, path: str, nbytes: int, memory: Arena, quick: bool) -> tuple[float, float]:
    """Seconds that a copy takes of the thread that computes, with its record and its wait and what other threads do for
    it, and each further slice of the file that it reads.

    Products are timed with a copy beside each and without, in turns; the medians of the differences count. Copies are
    pages of a file of so many bytes, anywhere in it, which take next to nothing of the disk's and the memory's rates.
    """
    device = ThreadDevice(reader)
    device.arenas = {"device": memory}
    n, k = GEMM_SHAPES[0]
    products = cold_products(ROWS, n, k, torch.bfloat16)
    turns: list[Sequence[Sequence[Call]]] = [[()]]
    for slices in (1, SLICES):
        issued = [tuple(filter(None, (device.bind(item, None) for item in (
            Copy(DISK, _pages(path, nbytes, i, slices),
                 Span("device", i * SLICES * PAGE_NBYTES, slices * PAGE_NBYTES, "pages"), "pages"), Record(DISK, i)))))
            for i in range(SLOTS)]
        waits = [call for i in range(SLOTS) if (call := device.bind(Wait(COMPUTE, i), None)) is not None]
        turns.append([(*issue, wait) for issue, wait in zip(
            issued, waits[1:] + waits[:1], strict=True)])  # for the copy that was issued longest ago
    found = []
    for _ in range(QUICK_TURNS if quick else 31):
        times = []
        for beside in turns:
            times.append(_turn_s(products, beside) / LAUNCHES)
            device.finish()
        found.append(times)
    copy_s, slice_s = (median(times[i + 1] - times[i] for times in found) for i in (0, 1))
    return max(0.0, copy_s), max(0.0, slice_s / (SLICES - 1))


def _pages(path: str, nbytes: int, part: int, slices: int) -> FileSlice:
    """Pages of one of `SLOTS` parts of a file, too far from each other to be read as one."""
    room = nbytes // SLOTS // PAGE_NBYTES * PAGE_NBYTES
    step = room // SLICES // PAGE_NBYTES * PAGE_NBYTES
    bands = tuple(Band(i * step, 1, PAGE_NBYTES, ((0, PAGE_NBYTES),)) for i in range(slices))
    return FileSlice(path, part * room, slices * PAGE_NBYTES, bands if slices > 1 else ())


def _turn_s(products: Iterator[Call], beside: Sequence[Sequence[Call]]) -> float:
    """Seconds of so many products, each behind the calls that are `beside` it in turn."""
    rounds = itertools.cycle(beside)
    start = time.perf_counter()
    for _ in range(LAUNCHES):
        for call in next(rounds):
            call()
        next(products)()
    return time.perf_counter() - start
