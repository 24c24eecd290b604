"""Record when items ran, and write planned and actual lanes side by side for Perfetto."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from forebay.rewriter.ir.program import Copy, Item, Launch, Wait, tier_of
from forebay.runtime.devices.device import Call
from forebay.runtime.devices.virtual import TimedSpan

Moved = tuple[str, str, float, int]  # from tier, to tier, when (seconds), bytes


class Trace:
    """Collects spans of launches, waits and copies, and the bytes that copies have brought from tier to tier; seconds
    count from its making."""

    def __init__(self) -> None:
        self.zero = time.perf_counter()
        self.spans: list[TimedSpan] = []
        self.moved: list[Moved] = []
        self._lock = threading.Lock()

    def add(self, lane: str, label: str, start: float, end: float) -> None:
        with self._lock:
            self.spans.append((lane, label, start - self.zero, end - self.zero))

    def add_copy(self, item: Copy, nbytes: int, start: float, end: float) -> None:
        """Note a copy that has brought `nbytes`."""
        self.add(item.stream, item.label, start, end)
        with self._lock:
            self.moved.append((tier_of(item.src), tier_of(item.dst), end - self.zero, nbytes))

    def link_nbytes(self) -> dict[tuple[str, str], int]:
        """Bytes brought from tier to tier so far."""
        found: dict[tuple[str, str], int] = {}
        for src, dst, _, nbytes in tuple(self.moved):
            found[src, dst] = found.get((src, dst), 0) + nbytes
        return found

    def until(self, item: Copy, nbytes: int, done: Callable[[BaseException | None], None]
              ) -> Callable[[BaseException | None], None]:
        """`done` for a copy that begins now; notes its span, and its bytes if they arrive, when it ends."""
        start = time.perf_counter()

        def traced(error: BaseException | None) -> None:
            self.add_copy(item, nbytes if error is None else 0, start, time.perf_counter())
            done(error)

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

        def run() -> None:
            start = time.perf_counter()
            call()
            self.add(lane, label, start, time.perf_counter())

        return run


def write_trace(
    path: str | Path, actual: Iterable[TimedSpan], planned: Iterable[TimedSpan] = (), moved: Iterable[Moved] = (),
    step_nbytes: Mapping[tuple[str, str], int] | None = None,
) -> None:
    """Write Chrome trace events (ui.perfetto.dev opens them): process 'actual' and process 'planned', a lane per
    stream, times in microseconds; a counter per link of the bytes `moved` so far, and of what a planned step moves."""
    events: list[dict[str, object]] = []
    for pid, (process, spans) in enumerate((("actual", actual), ("planned", planned)), start=1):
        spans = list(spans)
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}})
        lanes = {lane: tid for tid, lane in enumerate(dict.fromkeys(s[0] for s in spans), start=1)}
        for lane, tid in lanes.items():
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}})
        for lane, label, start, end in spans:
            events.append({"ph": "X", "name": label, "pid": pid, "tid": lanes[lane], "ts": start * 1e6,
                           "dur": (end - start) * 1e6})
    so_far: dict[str, int] = {}
    for src, dst, time_s, nbytes in sorted(moved, key=lambda copy: copy[2]):
        link = f"{src} to {dst}"
        so_far[link] = so_far.get(link, 0) + nbytes
        events.append({"ph": "C", "name": link, "pid": 1, "ts": time_s * 1e6, "args": {"bytes": so_far[link]}})
    for (src, dst), nbytes in (step_nbytes or {}).items():
        events.append({"ph": "C", "name": f"{src} to {dst}", "pid": 2, "ts": 0.0, "args": {"bytes per step": nbytes}})
    Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
