"""The fixed cost of a request to the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from statistics import median

from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.runtime.devices.streams import wait_watched
from forebay.runtime.disk.reader import DiskReader
from forebay.runtime.run.arena import Arena

ROWS = 64  # of a timed lookup


def row_request_s(reader: DiskReader, path: str, nbytes: int, memory: Arena, turns: int = 9) -> float:
    """Seconds of each further read of a lookup, whose rows lie too far apart in a file of so many bytes to come in one:
    the median of turns, each a lookup of many beside one of a single row."""
    pages = nbytes // PAGE_NBYTES
    found = []
    for turn in range(turns):
        rows = [(turn + i * pages // ROWS) % pages for i in range(ROWS)]
        alone = _lookup_s(reader, path, rows[:1], memory)
        found.append((_lookup_s(reader, path, rows, memory) - alone) / (ROWS - 1))
    return max(0.0, median(found))


def _lookup_s(reader: DiskReader, path: str, rows: Sequence[int], memory: Arena) -> float:
    """Seconds of a lookup of pages; raises what it meets."""
    errors, ended = list[BaseException](), threading.Event()

    def on_done(error: BaseException | None) -> None:
        errors.extend([] if error is None else [error])
        ended.set()

    start = time.perf_counter()
    reader.read_rows(path, 0, PAGE_NBYTES, rows, memory.address, on_done)
    wait_watched(ended.wait, reader.fault)
    time_s = time.perf_counter() - start
    if errors:
        raise errors[0]
    return time_s
