"""Several reads or writes that are one to who waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from forebay.runtime.disk.chunks import OnDone


class Together:
    """Calls `done` once when `parts` parts have ended, with the first error among them. They may then be issued again.
    """

    def __init__(self, parts: int, done: OnDone) -> None:
        self._parts = self._left = parts
        self._done = done
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def issue(self, parts: Iterable[Callable[[], object]]) -> None:
        """Issue all parts; those from the first on that cannot be issued, or not even be made, have ended with its
        error. So `done` is called once the others have ended too, and nothing is under way then."""
        issued, failed = 0, None
        try:
            for issue in parts:
                issue()
                issued += 1
        except BaseException as error:
            failed = error
        for _ in range(self._parts - issued):
            self.part(failed)

    def part(self, error: BaseException | None) -> None:
        """Tell that one part has ended."""
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            if self._left:
                return
            first, self._error, self._left = self._error, None, self._parts
        self._done(first)
