"""Host-side streams and events: a FIFO worker thread, and tickets that say when something is done.

No wait is for ever: each looks, once a second, whether the threads that could end it are still there.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.disk.chunks import OnDone

WATCH_S = 1.0
LEAVE_S = 10.0  # that the end of the process waits for a call of a worker

FaultCheck = Callable[[], BaseException | None]  # what ended the threads that would end a wait; None while they live


def wait_watched(wait: Callable[[float], bool], watch: FaultCheck) -> None:
    """Repeat `wait`, which takes seconds and tells whether what it waits for has come, until it has; RuntimeFault once
    `watch` says that nobody is left to bring it."""
    while not wait(WATCH_S):
        fault = watch()
        if fault is not None and not wait(0):
            raise RuntimeFault(f"what a step waits for will not come: {fault}") from fault


class Engine(Protocol):
    """Threads that work for others."""

    def fault(self) -> BaseException | None: ...


def first_fault(engines: Iterable[Engine | None]) -> BaseException | None:
    """Return the error that ended one of the engines; None while all of them live."""
    return next((fault for engine in engines if engine is not None and (fault := engine.fault()) is not None), None)


def nobody() -> None:
    """The watch of a wait that the waiting thread itself ends, or that another one watches."""


class Ticket:
    """Done when `parts` parts are; carries the first error among them. `watch` looks after who is to be done."""

    __slots__ = ("_event", "error", "parts", "watch")

    def __init__(self, parts: int = 1, watch: FaultCheck = nobody) -> None:
        self._event = threading.Event()
        self.parts, self.watch = parts, watch
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
        if not self._event.is_set():
            wait_watched(self._event.wait, self.watch)
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def told(done: OnDone) -> Iterator[OnDone]:
    """For a copy that has begun and is to be issued within: if it cannot be, `done` is told, for whoever waits."""
    try:
        yield done
    except BaseException as error:
        done(error)
        raise


class Worker:
    """Runs callables first in, first out, on a thread of its own; keeps the first error, and runs the rest all the
    same, so that whoever waits behind it is woken and told."""

    def __init__(self, name: str, watch: FaultCheck = nobody) -> None:
        self._watch = watch  # of whoever a call may wait for
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self._closed = False
        self._submitted = self._ended = 0  # each counted by one thread alone
        self._thread = threading.Thread(target=self._run, name=f"forebay-{name}", daemon=True)
        self._thread.start()
        self._leaving = weakref.finalize(self, _leave, self._queue, self._thread)  # at exit, while the thread lives

    def submit(self, call: Callable[[], object]) -> None:
        """For one thread to call, but for those that wait."""
        self._submitted += 1
        self._queue.put(call)

    @property
    def idle(self) -> bool:
        """Whether all that was submitted has run, without an error: whoever submits may then do by itself what comes
        next."""
        return self._submitted == self._ended and self.error is None

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except SystemExit:  # raised in another thread it would end the process without a word
                self.error = self.error or RuntimeFault(f"the thread {self._thread.name} has ended")
            except BaseException as error:  # handed to whoever waits
                self.error = self.error or error
            self._ended += 1

    def fault(self) -> BaseException | None:
        """Return why nothing that was submitted is done any more; None while it is."""
        if self._closed or self._thread.is_alive():
            return None if self._closed else self._watch()
        return self.error or RuntimeError(f"the thread {self._thread.name} has ended")

    def wait_idle(self) -> None:
        """Block until everything submitted so far has run; raise the first error any of it met."""
        idle = threading.Event()
        self.submit(idle.set)
        wait_watched(idle.wait, self.fault)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        stuck = self._watch() is not None
        self._closed = True
        self._queue.put(None)
        self._thread.join(LEAVE_S / 10 if stuck else None)  # what it waits for may never come
        self._leaving.detach()


def _leave(calls: queue.SimpleQueue[Callable[[], object] | None], thread: threading.Thread) -> None:
    """End a worker's thread behind the call that it runs. One that is inside torch while the interpreter ends would
    abort the process (exit code 134), whatever it had achieved."""
    with contextlib.suppress(queue.Empty):
        while True:
            calls.get_nowait()
    calls.put(None)
    thread.join(LEAVE_S)


class CopyLedger:
    """Which asynchronous copies have ended, so that 'all issued so far' can be waited for: copies are numbered as they
    begin, and a mark n stands for all with smaller numbers. `watch` looks after who is to end them."""

    def __init__(self, watch: FaultCheck = nobody) -> None:
        self.watch = watch
        self._lock = threading.Lock()
        self._sleepers: list[tuple[int, threading.Lock]] = []  # marks waited for, each with a lock to open then
        self._begun = 0
        self._low = 0  # all copies below have ended
        self._beyond: set[int] = set()  # those above that have
        self._tickets: deque[tuple[int, Ticket]] = deque()
        self.error: BaseException | None = None

    def number(self) -> int:
        """Note that a copy begins; its number, for `end`."""
        with self._lock:
            self._begun += 1
            return self._begun - 1

    def end(self, number: int, error: BaseException | None) -> None:
        """Note that a copy has ended; once for each."""
        with self._lock:
            self.error = self.error or error
            if number != self._low:
                self._beyond.add(number)
                return
            self._low += 1
            while self._low in self._beyond:
                self._beyond.remove(self._low)
                self._low += 1
            while self._tickets and self._tickets[0][0] <= self._low:
                self._tickets.popleft()[1].done(self.error)
            if self._sleepers:
                for sleeper in [s for s in self._sleepers if s[0] <= self._low]:
                    self._sleepers.remove(sleeper)
                    sleeper[1].release()

    def begin(self) -> Callable[[BaseException | None], None]:
        """Note that a copy begins; the result is to be called once when it is done."""
        return functools.partial(self.end, self.number())

    def mark(self) -> int:
        """The mark of all copies begun so far."""
        return self._begun

    def wait(self, mark: int) -> None:
        """Block until all copies of `mark` have ended; raise the first error that any copy met."""
        if self._low < mark:
            gate = threading.Lock()
            gate.acquire()
            with self._lock:
                if self._low < mark:
                    self._sleepers.append((mark, gate))
                else:
                    gate.release()
            # a Condition would wake for every copy that ends, and takes several times as long
            wait_watched(lambda wait_s: gate.acquire(timeout=wait_s), self.watch)
        if self.error is not None:
            raise self.error

    def record(self, ticket: Ticket | None = None) -> Ticket:
        """A ticket (the one given, or a new one) that is done when all copies begun so far are."""
        ticket = ticket or Ticket(watch=self.watch)
        with self._lock:
            if self._low == self._begun:
                ticket.done(self.error)
            else:
                self._tickets.append((self._begun, ticket))
        return ticket
