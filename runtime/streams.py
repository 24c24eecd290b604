"""Host-side streams and events: a FIFO worker thread, and tickets that say when something is done."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Ticket:
    """Done when `parts` parts are; carries the first error among them."""

    __slots__ = ("_event", "error", "parts")

    def __init__(self, parts: int = 1) -> None:
        self._event = threading.Event()
        self.parts = parts
        self.error: BaseException | None = None

    def done(self, error: BaseException | None = None) -> None:
        """Tell that one part is done; the caller serialises calls for one ticket."""
        self.error = self.error or error
        self.parts -= 1
        if self.parts <= 0:
            self._event.set()

    def ready(self) -> bool:
        return self._event.is_set()

    def wait(self) -> None:
        """Block until done; raise the error if one came."""
        self._event.wait()
        if self.error is not None:
            raise self.error


class Worker:
    """Runs callables first in, first out, on a thread of its own; keeps the first error, and runs the rest all the
    same, so that whoever waits behind it is woken and told."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"forebay-{name}", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], object]) -> None:
        self._queue.put(call)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except BaseException as error:  # handed to whoever waits
                self.error = self.error or error

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


class CopyLedger:
    """Which asynchronous copies are under way, so that a ticket can stand for 'all issued so far'."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets: dict[int, list[Ticket]] = {}
        self._next = 0
        self.error: BaseException | None = None

    def begin(self) -> Callable[[BaseException | None], None]:
        """Note a copy; the result is to be called once when it is done."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._tickets[number] = []

        def done(error: BaseException | None) -> None:
            with self._lock:
                self.error = self.error or error
                for ticket in self._tickets.pop(number):
                    ticket.done(error)

        return done

    def record(self, ticket: Ticket | None = None) -> Ticket:
        """A ticket (the one given, or a new one) that is done when all copies begun so far are."""
        ticket = ticket or Ticket()
        with self._lock:
            if not self._tickets:
                ticket.done(self.error)
                return ticket
            ticket.parts = len(self._tickets)
            for waiting in self._tickets.values():
                waiting.append(ticket)
        return ticket
