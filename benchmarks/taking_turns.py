"""Contestants that compute a short while each, in turns, so that what others take of the machine falls on all alike."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

TURN_S = 0.5
Result = TypeVar("Result")


class Turns:
    """Whose turn it is. A contestant calls `step` after each of its steps, which returns when it may go on."""

    def __init__(self, names: Iterable[str], turn_s: float) -> None:
        self._names, self._turn_s = list(names), turn_s
        self._at, self._since = 0, time.monotonic()
        self._changed = threading.Condition()
        self._waited_s = dict.fromkeys(self._names, 0.0)

    def step(self, name: str) -> None:
        """Let the next contestant compute if this one has for as long as a turn, and wait for the next turn."""
        if time.monotonic() - self._since < self._turn_s or len(self._names) == 1:
            return
        paused = time.monotonic()
        with self._changed:
            self._pass((self._at + 1) % len(self._names))
        self.begin(name)
        self._waited_s[name] += time.monotonic() - paused

    def begin(self, name: str) -> None:
        """Wait for the first turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._names[self._at] == name)

    def leave(self, name: str) -> None:
        """Have no more turns."""
        with self._changed:
            gone, current = self._names.index(name), self._names[self._at]
            following = self._names[(gone + 1) % len(self._names)] if current == name else current
            self._names.remove(name)
            self._pass(self._names.index(following) if self._names else 0)

    def clock(self, name: str) -> float:
        """Seconds, without those in which this contestant waited for its turns."""
        return time.monotonic() - self._waited_s[name]

    def _pass(self, to: int) -> None:
        self._at, self._since = to, time.monotonic()
        self._changed.notify_all()


def in_turns(contestants: Mapping[str, Callable[[Turns], Result]], turn_s: float = TURN_S) -> dict[str, Result]:
    """What each contestant gives, run on a thread of its own in its turns. What one of them raises is raised when the
    others have ended."""
    turns = Turns(contestants, turn_s)

    def run(name: str) -> Result:
        turns.begin(name)
        try:
            return contestants[name](turns)
        finally:
            turns.leave(name)

    with ThreadPoolExecutor(len(contestants)) as pool:
        running = {name: pool.submit(run, name) for name in contestants}
        return {name: future.result() for name, future in running.items()}
