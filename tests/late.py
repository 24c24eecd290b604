"""Reads and writes that begin late, so that they overtake each other."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

import forebay.runtime.devices.open_device as open_device_module
import forebay.runtime.disk.spill as spill_module


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

    def fault(self) -> BaseException | None:
        return self.other.fault()

    def close(self) -> None:
        self.other.close()


def make_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """All readers and writers that are opened from here on."""
    opened, made = open_device_module.open_reader, spill_module.open_writer
    monkeypatch.setattr(open_device_module, "open_reader", lambda *a, **k: Late(opened(*a, **k), 3))
    monkeypatch.setattr(spill_module, "open_writer", lambda *a: Late(made(*a), 5))
