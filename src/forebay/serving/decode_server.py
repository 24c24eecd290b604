"""Decoding apart from prefill: a process without HTTP, to which another one hands prompts with their cache."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from forebay.drafting import drafting_per_slot
from forebay.language_model import LanguageModel
from forebay.rewriter.ir.turns import StepTurns
from forebay.runtime.run.handoff import ComputedPrompt, DecodeScheduler, handoff_slots
from forebay.runtime.run.progress import WorkDone
from forebay.runtime.run.request import Request
from forebay.runtime.run.scheduler import answer_arriving
from forebay.serving.handoff_wire import Terms, Wire, request_of
from forebay.serving.run_server import signals_to

LOG = logging.getLogger("forebay")
HELLO_S = 2  # within which who connects says what it is


def bound_path(path: str) -> socket.socket:
    """A socket at a path, which only this user may reach; OSError where a process listens there already."""
    at = socket.socket(socket.AF_UNIX)
    try:
        with socket.socket(socket.AF_UNIX) as other:
            taken = other.connect_ex(path) == 0
        if taken:
            raise FileExistsError(errno.EEXIST, "another process decodes there; name another path")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of one that was killed
        at.bind(path)
        os.chmod(path, 0o600)
        at.listen()
    except BaseException:
        at.close()
        raise
    return at


class DecodeServer:
    """Decodes the prompts that one process at a time hands over at a socket, until `stop`.

    Args:
        lm: A planned model.
        prompt: Tokens of its slots' prompts, and `new_tokens` of answers.
        eos: Tokens that end answers.
        turns: Of the steps.
    """

    def __init__(
        self, lm: LanguageModel, prompt: int, new_tokens: int, eos: frozenset[int], turns: StepTurns
    ) -> None:
        self.lm, self.prompt, self.new_tokens, self.eos, self.turns = lm, prompt, new_tokens, eos, turns
        self._changed = threading.Condition()
        self._came: deque[tuple[int, ComputedPrompt]] = deque()
        self._numbers: dict[int, tuple[Wire, int]] = {}  # whose they are, and how that one calls them
        self._own = itertools.count()
        self._told: dict[Wire, list[tuple[int, int]]] = {}
        self._wire: Wire | None = None
        self._stopping = False

    def run(self, at: socket.socket, on_start: Callable[[], None] = lambda: None) -> None:
        """Decode at a listening socket, which is closed at the end."""
        computed: dict[int, ComputedPrompt] = {}
        with signals_to(self.stop), self.lm.running(1, self.prompt, self.new_tokens, continuous=True) as session, (
                drafting_per_slot(self.lm.helper, session)) as drafter:
            slots = handoff_slots(session, self.lm.captured.states)
            threading.Thread(target=self._accept, args=(at, Terms.of(self.lm, slots)), daemon=True).start()
            on_start()
            try:
                answer_arriving(session, partial(self._arriving, computed), self.eos, on_next=self._next,
                                on_end=self._end, on_step=self._tell, turns=self.turns, drafter=drafter,
                                make=partial(DecodeScheduler, slots, computed))
            finally:
                self._stopping = True
                os.unlink(at.getsockname())
                at.shutdown(socket.SHUT_RDWR)
                at.close()
                if self._wire is not None:
                    self._wire.close()
        self.lm.close()

    def stop(self) -> None:
        """End `run` once the prompts that decode have ended; from any thread, or a signal's handler."""
        self._stopping = True
        threading.Thread(target=self._wake, daemon=True).start()  # a handler may have interrupted who holds the lock

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _accept(self, at: socket.socket, terms: Terms) -> None:
        """Take prompts of one process after another."""
        while not self._stopping:
            try:
                wire = self._wire = Wire(at.accept()[0])
            except OSError:
                return
            try:
                wire.wait_at_most(HELLO_S)
                other = Terms(**wire.receive()[0])
                wire.wait_at_most(0)
                wire.send(asdict(terms))
                while not other.mismatch(terms):
                    message, cache = wire.receive()
                    with self._changed:
                        if "cancel" in message:
                            self._forget(wire, message["cancel"])
                            continue
                        number = next(self._own)
                        self._numbers[number] = wire, message["number"]
                        self._came.append((number, ComputedPrompt(request_of(message), message["first"], cache)))
                        self._changed.notify_all()
            except (OSError, ValueError, KeyError, TypeError) as error:
                LOG.info("the process that hands prompts over has left: %s", error)
            finally:
                with self._changed:
                    self._forget(wire)
                wire.close()

    def _forget(self, wire: Wire, named: int | None = None) -> None:
        """Nobody waits for a request of a process, or for any of them."""
        for number, whose in list(self._numbers.items()):
            if whose == (wire, named) or (named is None and whose[0] is wire):
                del self._numbers[number]

    def _arriving(self, computed: dict[int, ComputedPrompt], free: int, idle: bool) -> dict[int, Request] | None:
        with self._changed:
            while idle and not self._came and not self._stopping:
                self._changed.wait()
            if self._stopping:
                return None
            came: dict[int, Request] = {}
            while self._came and len(came) < free:
                number, prompt = self._came.popleft()
                if number in self._numbers:
                    came[number], computed[number] = prompt.request, prompt
            return came

    def _next(self, number: int, token: int) -> bool:
        with self._changed:
            if (whose := self._numbers.get(number)) is None:
                return False
            self._told.setdefault(whose[0], []).append((whose[1], token))
        return True

    def _end(self, number: int, new: list[int]) -> None:
        self.lm.check_files()
        with self._changed:
            self._numbers.pop(number, None)

    def _tell(self, work: WorkDone) -> None:
        """Send the tokens of a step."""
        for wire, tokens in self._told.items():
            with contextlib.suppress(OSError):  # it is noticed where prompts are received
                wire.send({"tokens": tokens})
        self._told.clear()
