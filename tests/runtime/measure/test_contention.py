"""Reads beside products: a rate is of reads that landed, however long the disk takes for one; what the cores bear."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.runtime.disk.chunks import Read
from forebay.runtime.measure import contention
from forebay.runtime.measure.contention import ReadFlow
from forebay.runtime.measure.kernels import READ_NBYTES


class SlowReader:
    """Lands each read 50 ms after it was asked for."""

    def fault(self) -> None:
        return None

    def submit(self, read: Read) -> None:
        threading.Timer(0.05, read.on_done, (None,)).start()


def test_a_turn_in_which_nothing_lands_waits_for_the_first_read(monkeypatch: Any) -> None:
    monkeypatch.setattr("forebay.runtime.measure.contention.open_reader", lambda *_: SlowReader())
    link: Any = SimpleNamespace(method="buffered", depth=1, chunk_nbytes=1 << 20)
    memory: Any = SimpleNamespace(address=0, nbytes=4 * READ_NBYTES)
    flow = ReadFlow("file", 8 * READ_NBYTES, link, memory)
    for _ in range(3):
        flow.start()
        assert 0 < flow.stop() < float("inf")


@pytest.mark.parametrize(("beside_s", "rates", "share"), [
    (2.0, (10.0, 5.0), 1.0),  # half of each: one after the other
    (1.25, (10.0, 8.0), 0.25),  # a fifth of the products' time for four fifths of the reads
    (1.0, (10.0, 9.0), 0.0), (0.9, (10.0, 9.0), 0.0),  # products as fast as alone
    (4.0, (10.0, 1.0), 1.0)])  # memory that both want: no more than one after the other
def test_what_products_lack_is_what_reads_took_of_the_cores(
    beside_s: float, rates: tuple[float, float], share: float, monkeypatch: Any
) -> None:
    times, seen = itertools.cycle((1.0, beside_s)), itertools.cycle(rates)
    monkeypatch.setattr(contention, "share_now", lambda: 0.0)
    monkeypatch.setattr(contention, "_repeat_s", lambda turn, time_s: next(times))
    monkeypatch.setattr(contention.time, "sleep", lambda _: None)
    flow: Any = SimpleNamespace(start=lambda: None, stop=lambda: next(seen))
    assert contention._core_share(flow, iter(()), 3) == pytest.approx(share)


def test_nothing_is_said_of_cores_that_others_use(monkeypatch: Any) -> None:
    monkeypatch.setattr(contention, "share_now", lambda: contention.LOADED + 0.01)
    assert contention._core_share(SimpleNamespace(), iter(()), 3) is None  # type: ignore[arg-type]
