"""The time that a copy takes from the computing thread."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from statistics import median

import torch

from forebay.kernels.operator import Call
from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.ir.program import COMPUTE, DISK, Copy, FileSlice, Record, Span, Wait
from forebay.runtime.devices.cpu.device import ThreadDevice
from forebay.runtime.disk.reader import DiskReader
from forebay.runtime.measure.kernels import GEMM_SHAPES, cold_products
from forebay.runtime.run.arena import Arena

ROWS = 8  # of x: a product takes longer than a third of a read's latency, so that no wait blocks
SLOTS = 4
LAUNCHES = 32  # of a turn
QUICK_TURNS = 3


def copy_issue_s(reader: DiskReader, path: str, nbytes: int, memory: Arena, quick: bool) -> float:
    """Seconds that a copy takes of the thread that computes, with its record and its wait and what other threads do for
    it: of products with a copy beside each and without, in turns, the median of the differences. Copies are pages of a
    file of so many bytes, anywhere in it, which take next to nothing of the disk's and the memory's rates."""
    device = ThreadDevice(reader)
    device.arenas = {"device": memory}
    n, k = GEMM_SHAPES[0]
    products = cold_products(ROWS, n, k, torch.bfloat16)
    pages = nbytes // PAGE_NBYTES
    issued = [tuple(filter(None, (device.bind(item, None) for item in (
        Copy(DISK, FileSlice(path, i * (pages // SLOTS) * PAGE_NBYTES, PAGE_NBYTES),
             Span("device", i * PAGE_NBYTES, PAGE_NBYTES, "page"), "page"), Record(DISK, i)))))
        for i in range(SLOTS)]
    waits = [call for i in range(SLOTS) if (call := device.bind(Wait(COMPUTE, i), None)) is not None]
    found = []
    for _ in range(QUICK_TURNS if quick else 31):
        alone_s = _turn_s(products, [()])
        beside_s = _turn_s(products, [(*issue, wait) for issue, wait in zip(
            issued, waits[1:] + waits[:1], strict=True)])  # for the copy that was issued longest ago
        device.finish()
        found.append((beside_s - alone_s) / LAUNCHES)
    return max(0.0, median(found))


def _turn_s(products: Iterator[Call], beside: Sequence[Sequence[Call]]) -> float:
    """Seconds of so many products, each behind the calls that are `beside` it in turn."""
    rounds = itertools.cycle(beside)
    start = time.perf_counter()
    for _ in range(LAUNCHES):
        for call in next(rounds):
            call()
        next(products)()
    return time.perf_counter() - start
