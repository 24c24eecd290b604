"""Contention of computing and reads from disk: at once, and over a second, in which they share the cores."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

import torch

from forebay.kernels.operator import Call
from forebay.rewriter.machine.points import Contention
from forebay.rewriter.machine.profile import Link
from forebay.rewriter.machine.quality import LOADED
from forebay.runtime.disk.chunks import Read
from forebay.runtime.disk.reader import open_reader
from forebay.runtime.measure.flow import Flow
from forebay.runtime.measure.kernels import GEMM_SHAPES, READ_NBYTES, cold_products
from forebay.runtime.measure.neighbours import share_now
from forebay.runtime.measure.steady import settled_rate, settled_s
from forebay.runtime.run.arena import Arena

MANY_ROWS = 64  # of x, whose products only calculate
SOME_ROWS = 8  # as steps have them: bound by neither alone
QUICK_TURNS = 2
TURN_S = 0.015  # each pair is compared within the machine's mood, and before an account of its cores' time is overdrawn
REST_S = 0.01
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


def measure_contention(
    path: str, nbytes: int, link: Link, memory: Arena, quick: bool
) -> tuple[Contention, float | None]:
    """Slowdowns of products and of cold reads of `path` at once, taken in turns, and what a second of such reads takes
    of the time of all cores (0..1). That is None where others use the cores, which nothing tells apart from it, and
    where it is to be `quick`: it takes seconds."""
    n, k = GEMM_SHAPES[0]
    calls = {m: cold_products(m, n, k, torch.bfloat16)
             for m in (1, SOME_ROWS, MANY_ROWS)}  # bound by memory, by neither alone, and by arithmetic
    flow = ReadFlow(path, nbytes, link, memory)
    with contextlib.closing(flow.reader):
        turns = {m: _Beside([], [], []) for m in (1, MANY_ROWS)}
        rates = []
        for _ in range(QUICK_TURNS if quick else 33):
            rates.append(_read_rate(flow))
            for m, seen in turns.items():
                _at_once(flow, calls[m], seen)
        share = None if quick else _core_share(flow, calls[SOME_ROWS], 7)
    slowed = {m: max(1.0, settled_s(seen.beside_s) / settled_s(seen.alone_s)) for m, seen in turns.items()}
    slows = {m: max(1.0, settled_rate(rates) / settled_rate(seen.rates)) for m, seen in turns.items()}
    return Contention(slowed[1], slowed[MANY_ROWS], slows[1], slows[MANY_ROWS]), share


class _Beside(NamedTuple):
    """Seconds of a product alone and beside reads, and the rates of those reads."""

    alone_s: list[float]
    beside_s: list[float]
    rates: list[float]


def _read_rate(flow: ReadFlow) -> float:
    """Bytes per second of a turn of reads alone."""
    flow.start()
    time.sleep(TURN_S)
    rate = flow.stop()
    time.sleep(REST_S)
    return rate


def _at_once(flow: ReadFlow, turn: Iterator[Call], seen: _Beside) -> None:
    """Note a product alone, and beside reads. Both rest before and after, so that what they have of the cores over a
    longer time does not bind them here."""
    seen.alone_s.append(_repeat_s(turn, TURN_S))
    time.sleep(REST_S)
    flow.start()
    seen.beside_s.append(_repeat_s(turn, TURN_S))
    seen.rates.append(flow.stop())
    time.sleep(2 * REST_S)


def _core_share(flow: ReadFlow, turn: Iterator[Call], rounds: int) -> float | None:
    """Return the share of all cores' time that reads take: the time that matmuls lack of their time beside reads, for
    the share of their rate at which these run meanwhile. A virtual machine or a container that is given the time of so
    many processors pays for its disk from that, which turns shorter than the period of its account do not show. None
    where others use the cores."""
    if share_now() > LOADED:
        return None
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
