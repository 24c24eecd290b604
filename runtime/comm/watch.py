"""Whether the other ranks live: each says so once a second, and what it failed by.

A collective waits for its peers as long as they take, for a rank may read from a slow disk for minutes. So it is not
its time that tells a rank that hangs or is gone, but that nothing is heard of it.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from forebay.runtime.comm.launched import store_place
from forebay.runtime.devices.device import RuntimeFault

BEAT_S = 1.0
SILENT_S = 12.0  # a rank that says nothing for so long is taken to be gone; all others then end within a few more
ANSWER_S = 2.0  # that the store of all ranks may take


class RankFault(RuntimeFault):
    """Another rank failed, hangs or is gone; the message names it."""


class RankWatch:
    """Tells other ranks that this one lives, and looks after them, on a thread of its own until `close`. `fault` is
    what is wrong with one of them."""

    def __init__(self, store: dist.Store, rank: int, ranks: int) -> None:
        self._store, self._rank = store.clone() if hasattr(store, "clone") else store, rank
        self._others = [other for other in range(ranks) if other != rank]
        self._seen = dict.fromkeys(self._others, ("", time.monotonic()))
        self._fault: RankFault | None = None
        self._heard = time.monotonic()  # when the store answered last
        self._doubted: float | None = None  # since when that is too long ago
        self._closed = threading.Event()
        with contextlib.suppress(Exception):
            self._store.set_timeout(timedelta(seconds=ANSWER_S))
        self._beat(0)
        self._thread = threading.Thread(target=self._run, name="forebay-ranks", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that Python ends within a call of the store takes the process down

    def fault(self) -> RankFault | None:
        """Return the failure of another rank, or of the connection to all; None while all are heard of."""
        now = time.monotonic()
        if now - self._heard <= SILENT_S:
            self._doubted = None
        elif self._doubted is None:  # a process that was stopped for long has only to be heard once more
            self._doubted = now
        elif self._fault is None and now - self._doubted > 3 * BEAT_S:
            self._fault = RankFault(f"the ranks' store{store_place()} has not been heard of for {SILENT_S:g} s: who "
                                    "keeps it hangs or is gone, or this rank has lost its link")
        return self._fault

    def tell(self, error: BaseException) -> None:
        """Tell the others by what this rank fails."""
        with contextlib.suppress(Exception):
            self._store.set(f"forebay/failed/{self._rank}", " ".join(str(error).split())[:500] or type(error).__name__)

    def named(self, wait_s: float = SILENT_S + 3 * BEAT_S) -> RankFault | None:
        """The fault of another rank, once it is known or `wait_s` have passed: an exchange that broke off knows its
        peer's address alone."""
        end = time.monotonic() + wait_s
        while self.fault() is None and time.monotonic() < end and not self._closed.wait(BEAT_S / 4):
            pass
        return self._fault

    def close(self) -> None:
        atexit.unregister(self.close)
        self._closed.set()
        self._thread.join(SILENT_S)  # it may wait for a store that is out of reach

    def _run(self) -> None:
        count = 0
        while not self._closed.wait(BEAT_S):
            count += 1
            try:
                self._beat(count)
                if time.monotonic() - self._heard > SILENT_S / 2:  # this rank was stopped: so were others, perhaps
                    self._seen = {other: (beat, time.monotonic()) for other, (beat, _) in self._seen.items()}
                self._look()
                self._heard = time.monotonic()
            except Exception as error:  # whoever keeps the store is gone
                said = str(error).splitlines()[0]
                self._fault = self._fault or RankFault(
                    f"the ranks' store{store_place()} does not answer: who keeps it is gone ({said})")
            if self._fault is not None:
                return

    def _beat(self, count: int) -> None:
        self._store.set(f"forebay/alive/{self._rank}", str(count))

    def _look(self) -> None:
        now = time.monotonic()
        for other in self._others:
            if self._store.check([f"forebay/failed/{other}"]):
                said = self._store.get(f"forebay/failed/{other}").decode(errors="replace")
                self._fault = RankFault(f"rank {other} failed: {said}")
                return
            beat = ""
            if self._store.check([f"forebay/alive/{other}"]):
                beat = self._store.get(f"forebay/alive/{other}").decode()
            known, since = self._seen[other]
            if beat != known:
                self._seen[other] = beat, now
            elif now - since > SILENT_S:
                self._fault = RankFault(f"rank {other} has not been heard of for {SILENT_S:g} s: it hangs or is gone")
                return
