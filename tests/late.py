"""Copies, and work of the host's, that begin late, so that they overtake each other."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import forebay.runtime.devices.open_device as open_device_module
import forebay.runtime.disk.spill as spill_module
from forebay.runtime.devices.streams import Worker


class Late:
    """A reader or writer that begins after a random while, in any order."""

    def __init__(self, other: Any, seed: int) -> None:
        self.other, self.chance = other, random.Random(seed)

    def _later(self, call: Callable[..., None], *args: Any) -> None:
        threading.Timer(self.chance.choice((0.0, 0.002, 0.006)), call, args).start()

    def prepare(self, read: Any) -> Callable[[], None]:
        queue = self.other.prepare(read)
        return lambda: self._later(queue)

    def submit(self, read: Any) -> None:
        self.prepare(read)()

    def read_rows(self, *args: Any) -> None:
        self._later(self.other.read_rows, *args)

    def write(self, file: Any, write: Any) -> None:
        self._later(self.other.write, file, write)

    def prepare_write(self, file: Any, write: Any) -> Callable[[], None]:
        queue = self.other.prepare_write(file, write)
        return lambda: self._later(queue)

    def fault(self) -> BaseException | None:
        return self.other.fault()

    def close(self) -> None:
        self.other.close()


def make_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """All readers and writers that are opened from here on, and what workers of the other streams are given."""
    opened, made = open_device_module.open_reader, spill_module.open_writer
    monkeypatch.setattr(open_device_module, "open_reader", lambda *a, **k: Late(opened(*a, **k), 3))
    monkeypatch.setattr(spill_module, "open_writer", lambda *a: Late(made(*a), 5))
    chance, submit = random.Random(7), Worker.submit

    def submitted(worker: Worker, call: Callable[[], object]) -> None:
        delay_s = chance.choice((0.0, 0.0, 0.001, 0.004))
        submit(worker, lambda: (time.sleep(delay_s), call()))

    monkeypatch.setattr(Worker, "submit", submitted)
