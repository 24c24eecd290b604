"""What computing and reads from disk do to each other: at once, and over a second, in which they share the cores."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from statistics import median

import torch

from forebay.kernels.operator import Call
from forebay.rewriter.machine.points import Contention
from forebay.rewriter.machine.profile import Link
from forebay.runtime.disk.chunks import Read
from forebay.runtime.disk.reader import open_reader
from forebay.runtime.measure.flow import Flow
from forebay.runtime.measure.kernels import GEMM_SHAPES, READ_NBYTES, cold_products
from forebay.runtime.run.arena import Arena

MANY_ROWS = 64  # of x, whose products only calculate
SOME_ROWS = 8  # as steps have them: bound by neither alone
TURN_S = 0.03  # each pair is compared within the machine's mood, and before an account of its cores' time is overdrawn
REST_S = 0.03
LONG_TURN_S = 0.8  # several periods of such an account, which last 0.1 s as a rule
class ReadFlow(Flow):
    """Reads of a file, three in flight, into `memory` in turn."""

    def __init__(self, path: str, nbytes: int, link: Link, memory: Arena) -> None:
        self.path, self.memory = path, memory
        self.reader = open_reader(link.method, link.depth, link.chunk_nbytes)
        super().__init__(READ_NBYTES, nbytes // READ_NBYTES * READ_NBYTES, 3, self.reader.fault)

    def send(self, at: int) -> None:
        place = self.memory.address + at // READ_NBYTES % (self.memory.nbytes // READ_NBYTES) * READ_NBYTES
        self.reader.submit(Read(self.path, at, READ_NBYTES, place, 0, 0, self.on_done))


def measure_contention(path: str, nbytes: int, link: Link, memory: Arena, quick: bool) -> tuple[Contention, float]:
    """Slowdowns of products and of cold reads of `path` at once, each the median of turns taken, and what a second of
    such reads takes of the time of all cores (0..1)."""
    n, k = GEMM_SHAPES[0]
    calls = {m: itertools.cycle(cold_products(m, n, k, torch.bfloat16))
             for m in (1, SOME_ROWS, MANY_ROWS)}  # bound by memory, by neither alone, and by arithmetic
    flow = ReadFlow(path, nbytes, link, memory)
    with contextlib.closing(flow.reader):
        found: dict[int, list[tuple[float, float]]] = {1: [], MANY_ROWS: []}
        for _ in range(17 if quick else 33):
            rate = _read_rate(flow)
            for m, pairs in found.items():
                pairs.append(_at_once(flow, calls[m], rate))
        share = _core_share(flow, calls[SOME_ROWS], 4 if quick else 7)
    slowed = {m: max(1.0, median(a for a, _ in pairs)) for m, pairs in found.items()}
    slows = {m: max(1.0, median(b for _, b in pairs)) for m, pairs in found.items()}
    return Contention(slowed[1], slowed[MANY_ROWS], slows[1], slows[MANY_ROWS]), share


def _read_rate(flow: ReadFlow) -> float:
    """Bytes per second of a turn of reads alone."""
    flow.start()
    time.sleep(TURN_S)
    rate = flow.stop()
    time.sleep(REST_S)
    return rate


def _at_once(flow: ReadFlow, turn: Iterator[Call], rate: float) -> tuple[float, float]:
    """How many times as long a product takes beside reads, and reads beside it, of `rate` bytes per second alone. Both
    rest before and after, so that what they have of the cores over a longer time does not bind them here."""
    alone = _repeat_s(turn, TURN_S)
    time.sleep(REST_S)
    flow.start()
    beside = _repeat_s(turn, TURN_S)
    slows = rate / flow.stop()
    time.sleep(2 * REST_S)
    return beside / alone, slows


def _core_share(flow: ReadFlow, turn: Iterator[Call], rounds: int) -> float:
    """Of the time of all cores, what a second of reads takes: what products lack of their time beside reads, for the
    share of their rate at which these run meanwhile. A virtual machine or a container that is given the time of so
    many processors pays for its disk from that, which turns shorter than the period of its account do not show."""
    found = []
    for _ in range(rounds):
        rate = _read_rate(flow)
        alone = _repeat_s(turn, LONG_TURN_S)
        flow.start()
        beside = _repeat_s(turn, LONG_TURN_S)
        found.append((1 - alone / beside) / (flow.stop() / rate))
    return min(1.0, max(0.0, median(found)))


def _repeat_s(turn: Iterator[Call], time_s: float) -> float:
    """Seconds per call over `time_s`, of one call at least: on a busy machine the thread may not come to another."""
    start, count, now = time.perf_counter(), 0, 0.0
    while not count or now < start + time_s:
        next(turn)()
        count += 1
        now = time.perf_counter()
    return (now - start) / count
