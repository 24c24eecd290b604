"""Transfers without end, so that a rate can be taken of them while something else runs."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from forebay.runtime.devices.streams import wait_watched


class Flow(ABC):
    """Transfers of `nbytes` each over a file of `span`, so many in flight, between `start` and `stop`. `fault` says
    what ended the engine's threads."""

    def __init__(self, nbytes: int, span: int, in_flight: int, fault: Callable[[], BaseException | None]) -> None:
        self.nbytes, self.span, self.in_flight, self.fault = nbytes, span, in_flight, fault
        self.at = self.flying = self.moved = 0
        self.flows = False
        self.error: BaseException | None = None
        self.idle, self.landed = threading.Event(), threading.Event()
        self.lock = threading.Lock()  # an engine may have several threads
        self.begin_s = 0.0

    @abstractmethod
    def send(self, at: int) -> None:
        """Submit the transfer at this offset of the file, with `on_done` for its end."""

    def start(self) -> None:
        self.flows, self.moved, self.flying, self.begin_s = True, 0, self.in_flight, time.perf_counter()
        self.idle.clear()
        self.landed.clear()
        for _ in range(self.in_flight):
            self._next()

    def _next(self) -> None:
        with self.lock:
            at, self.at = self.at, (self.at + self.nbytes) % self.span
        self.send(at)

    def on_done(self, error: BaseException | None) -> None:
        with self.lock:
            self.error = self.error or error
            self.moved += self.nbytes
            self.landed.set()
            goes_on = self.flows and error is None
            self.flying -= not goes_on
            if self.flying == 0:
                self.idle.set()
        if goes_on:
            self._next()

    def stop(self) -> float:
        """Bytes per second since `start`, once one has landed: a busy disk may take longer than a turn for one."""
        wait_watched(self.landed.wait, self.fault)
        rate = self.moved / (time.perf_counter() - self.begin_s)
        self.flows = False
        wait_watched(self.idle.wait, self.fault)
        if self.error is not None:
            raise self.error
        return rate
