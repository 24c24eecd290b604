"""Record when items ran, and write planned and actual lanes side by side for Perfetto."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forebay.rewriter.ir.files import written_whole
from forebay.rewriter.ir.program import Copy, Item, Launch, Wait, tier_of
from forebay.runtime.devices.device import Call
from forebay.runtime.devices.virtual import TimedSpan
from forebay.runtime.disk.chunks import OnDone

TierPair = tuple[str, str]  # from tier, to tier
Moved = tuple[str, str, float, int]  # from tier, to tier, when (seconds), bytes
SPAN = struct.Struct("=ddqi")  # start and end in seconds, bytes brought, number of its name
FIELDS = np.dtype([("start", "=f8"), ("end", "=f8"), ("nbytes", "=i8"), ("name", "=i4")])
ROOM = 1 << 18
TRACE_NBYTES = ROOM * SPAN.size  # of a trace that has as many spans as it keeps


class Trace:
    """Collects spans of launches, waits and copies, of which the latest `room` are kept, and the bytes that copies have
    brought from tier to tier; seconds count from its making."""

    def __init__(self, room: int = ROOM) -> None:
        self.zero, self.room = time.perf_counter(), room
        self.count = 0  # spans so far; number n lies at n modulo `room`
        self._spans = np.zeros(room, dtype=FIELDS)  # no memory until it is written to
        self._names: dict[tuple[str, str, TierPair | None], int] = {}  # lane, label, and what a copy joins
        self._moved: dict[TierPair, int] = {}
        self._lock = threading.Lock()

    def noting(self, lane: str, label: str, link: TierPair | None = None) -> Callable[[float, int], None]:
        """Return a function that records the end of a span of this name, from its begin (`time.perf_counter()`) and its
        bytes."""
        with self._lock:
            name = self._names.setdefault((lane, label, link), len(self._names))
        lock, clock, spans, zero, room = self._lock, time.perf_counter, self._spans.data, self.zero, self.room

        def note(start: float, nbytes: int) -> None:
            with lock:  # and the time taken within, so that spans lie in the order of their ends
                SPAN.pack_into(spans, self.count % room * SPAN.size, start - zero, clock() - zero, nbytes, name)
                self.count += 1
                if link is not None:
                    self._moved[link] = self._moved.get(link, 0) + nbytes

        return note

    def noting_copy(self, item: Copy) -> Callable[[float, int], None]:
        return self.noting(item.stream, item.label, (tier_of(item.src), tier_of(item.dst)))

    def under_way(self, item: Copy, nbytes: int, done: OnDone) -> tuple[Call, OnDone]:
        """Return a function to call when a copy begins, and `done` for it: it records the span, and its bytes if they
        arrive, when it ends. For any number of times, first begun first ended."""
        note, clock, starts = self.noting_copy(item), time.perf_counter, deque[float]()

        def traced(error: BaseException | None) -> None:
            note(starts.popleft(), nbytes if error is None else 0)
            done(error)

        return lambda: starts.append(clock()), traced

    def until(self, item: Copy, nbytes: int, done: OnDone) -> OnDone:
        """The same for a copy that begins now, once."""
        begin, traced = self.under_way(item, nbytes, done)
        begin()
        return traced

    def timed(self, item: Item, call: Call) -> Call:
        """`call` with its duration noted, where the item is work or waiting on the issuing thread."""
        if isinstance(item, Launch):
            lane, label = item.stream, item.label
        elif isinstance(item, Wait):
            lane, label = f"{item.stream} waits", f"event {item.event}"
        elif isinstance(item, Copy):
            lane, label = "issue", item.label
        else:
            return call
        note, clock = self.noting(lane, label), time.perf_counter

        def run() -> None:
            start = clock()
            call()
            note(start, 0)

        return run

    @property
    def gone(self) -> int:
        """Spans whose place later ones have taken."""
        return max(0, self.count - self.room)

    def spans(self) -> Iterator[TimedSpan]:
        """The kept spans, in the order in which they ended."""
        for (lane, label, _), start, end, _ in self._kept():
            yield lane, label, start, end

    def moved(self) -> Iterator[Moved]:
        """Bytes of the copies that are kept, in order of time; first, in one piece for each link, those of copies that
        are gone."""
        brought = np.zeros(len(self._names), dtype=np.int64)
        kept = self._spans[: self.count]
        np.add.at(brought, kept["name"], kept["nbytes"])
        gone = self.link_nbytes()
        for (*_, link), nbytes in zip(self._names, brought.tolist(), strict=True):
            if link is not None and nbytes:
                gone[link] -= nbytes
        for link, nbytes in gone.items():
            if nbytes:
                yield *link, float(kept["end"].min()), nbytes
        for (*_, link), _, end, nbytes in self._kept():
            if link is not None:
                yield *link, end, nbytes

    def _kept(self) -> Iterator[tuple[tuple[str, str, TierPair | None], float, float, int]]:
        """Name, start, end and bytes."""
        names = tuple(self._names)
        for n in range(self.gone, self.count):
            start, end, nbytes, name = SPAN.unpack_from(self._spans.data, n % self.room * SPAN.size)
            yield names[name], start, end, nbytes

    def link_nbytes(self) -> dict[TierPair, int]:
        """Bytes brought from tier to tier so far."""
        with self._lock:
            return dict(self._moved)


def write_trace(
    path: str | Path, actual: Iterable[TimedSpan], planned: Iterable[TimedSpan] = (), moved: Iterable[Moved] = (),
    step_nbytes: Mapping[TierPair, int] | None = None,
) -> None:
    """Write Chrome trace events (ui.perfetto.dev opens them): process 'actual' and process 'planned', a lane per
    stream, times in microseconds; a counter per link of the bytes `moved` so far (in order of time), and of what a
    planned step moves. Events are written one by one, so that
    nothing of the trace's size is held in memory, into a file that is there whole or not at all."""
    with written_whole(path) as file:
        before = '{"traceEvents": [\n'
        for event in _events(actual, planned, moved, step_nbytes or {}):
            file.write(before + json.dumps(event))
            before = ",\n"
        file.write("\n]}\n")


def _events(actual: Iterable[TimedSpan], planned: Iterable[TimedSpan], moved: Iterable[Moved],
            step_nbytes: Mapping[TierPair, int]) -> Iterator[dict[str, Any]]:
    for pid, (process, spans) in enumerate((("actual", actual), ("planned", planned)), start=1):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
        lanes: dict[str, int] = {}
        for lane, label, start, end in spans:
            if lane not in lanes:
                lanes[lane] = len(lanes) + 1
                yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": lanes[lane], "args": {"name": lane}}
            yield {"ph": "X", "name": label, "pid": pid, "tid": lanes[lane], "ts": start * 1e6,
                   "dur": (end - start) * 1e6}
    so_far: dict[str, int] = {}
    for src, dst, time_s, nbytes in moved:
        link = f"{src} to {dst}"
        so_far[link] = so_far.get(link, 0) + nbytes
        yield {"ph": "C", "name": link, "pid": 1, "ts": time_s * 1e6, "args": {"bytes": so_far[link]}}
    for (src, dst), nbytes in step_nbytes.items():
        yield {"ph": "C", "name": f"{src} to {dst}", "pid": 2, "ts": 0.0, "args": {"bytes per step": nbytes}}
