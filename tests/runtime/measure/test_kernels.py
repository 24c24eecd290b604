"""Reads beside products: a rate is of reads that landed, however long the disk takes for one."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from forebay.runtime.disk.chunks import Read
from forebay.runtime.measure.kernels import READ_NBYTES, ReadFlow


class SlowReader:
    """Lands each read 50 ms after it was asked for."""

    def fault(self) -> None:
        return None

    def submit(self, read: Read) -> None:
        threading.Timer(0.05, read.on_done, (None,)).start()


def test_a_turn_in_which_nothing_lands_waits_for_the_first_read(monkeypatch: Any) -> None:
    monkeypatch.setattr("forebay.runtime.measure.kernels.open_reader", lambda *_: SlowReader())
    link: Any = SimpleNamespace(method="buffered", depth=1, chunk_nbytes=1 << 20)
    memory: Any = SimpleNamespace(address=0, nbytes=4 * READ_NBYTES)
    flow = ReadFlow("file", 8 * READ_NBYTES, link, memory)
    for _ in range(3):
        flow.start()
        assert 0 < flow.stop() < float("inf")
