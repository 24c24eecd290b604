"""Record when items ran, and write planned and actual lanes side by side for Perfetto."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from forebay.rewriter.ir.program import Copy, Item, Launch, Wait
from forebay.runtime.devices.device import Call

Span = tuple[str, str, float, float]  # lane, label, start and end in seconds


class Trace:
    """Collects spans of launches, waits and copies; seconds count from its making."""

    def __init__(self) -> None:
        self.zero = time.perf_counter()
        self.spans: list[Span] = []
        self._lock = threading.Lock()

    def add(self, lane: str, label: str, start: float, end: float) -> None:
        with self._lock:
            self.spans.append((lane, label, start - self.zero, end - self.zero))

    def until(self, lane: str, label: str, done: Callable[[BaseException | None], None]
              ) -> Callable[[BaseException | None], None]:
        """`done` for asynchronous work that begins now; notes its span when it ends."""
        start = time.perf_counter()

        def traced(error: BaseException | None) -> None:
            self.add(lane, label, start, time.perf_counter())
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


def write_trace(path: str | Path, actual: Iterable[Span], planned: Iterable[Span] = ()) -> None:
    """Write Chrome trace events (ui.perfetto.dev opens them): process 'actual' and process 'planned', a lane per
    stream, times in microseconds."""
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
    Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
