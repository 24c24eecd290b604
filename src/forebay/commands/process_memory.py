"""What the process really takes: anonymous memory, pages in the page cache, bytes fetched from disk."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable

from forebay.runtime.disk.page_cache import resident_nbytes


class MemoryWatch:
    """Samples this process's anonymous memory, and the pages of `files` in the page cache, from a thread.

    `before` is the anonymous memory at the start; `peak` and `cached_peak` are the most seen, all in bytes.
    """

    PERIOD_S = 0.05

    def __init__(self, files: Iterable[str]) -> None:
        self.files = tuple(files)
        self.before = self.peak = anonymous_nbytes()
        self.cached_peak = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory watch", daemon=True)

    def _watch(self) -> None:
        while not self._end.wait(self.PERIOD_S):
            self._sample()

    def _sample(self) -> None:
        with contextlib.suppress(OSError):  # too many open files, say: what cannot be looked at is not counted
            self.peak = max(self.peak, anonymous_nbytes())
            self.cached_peak = max(self.cached_peak, sum(resident_nbytes(path) for path in self.files))

    def __enter__(self) -> MemoryWatch:
        with contextlib.suppress(RuntimeError):  # the system gives no more threads: what is seen at the end counts
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._sample()


def anonymous_nbytes() -> int:
    """Anonymous memory of this process that is in RAM: heap and arenas, without mapped files (Linux's RssAnon)."""
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def disk_read_nbytes() -> int:
    """Bytes this process has fetched from storage so far (not from the page cache); 0 where the system hides it."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("read_bytes:")), 0)
    except OSError:
        return 0


def available_nbytes() -> int:
    """Bytes of memory that the system could give to a new process."""
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
