"""Prefill apart from decoding: a batcher that computes prompts, and hands them on to a process that decodes."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from forebay.runtime.run.handoff import HandoffError, PrefillScheduler, handoff_slots
from forebay.runtime.run.request import Request
from forebay.runtime.run.scheduler import Scheduler
from forebay.runtime.run.session import Session
from forebay.serving.batcher import Batcher, Heard, Pending
from forebay.serving.handoff_wire import Terms, Wire, message_of
from forebay.serving.refusal import Refusal

LOG = logging.getLogger("forebay")
RETRY_S = 0.5
ANSWER_S = 10.0  # within which a process that decodes answers for itself
START_S = 300.0  # the same while it may still plan


class PrefillBatcher(Batcher):
    """Answers requests whose prompts it computes, by the tokens of the process at the socket `path` after the first.

    Requests with a grammar, log probabilities or images decode here. While nothing answers at `path`, requests are
    refused; those that decode there when it ends are told so.
    """

    def __init__(self, path: str, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.path, self.away = path, "no process decodes yet"
        self.decode_slots = 0
        self._elsewhere: dict[int, list[int]] = {}  # tokens so far by number
        self._wire: Wire | None = None
        self._ended = threading.Event()

    def start(self) -> None:
        """Start, once the process that decodes has answered.

        Raises:
            HandoffError: The plan cannot hand prompts on, or not to that process, or there is none.
        """
        with self.lm.running(1, self.prompt, self.new_tokens, continuous=True) as session:
            self._terms = Terms.of(self.lm, handoff_slots(session, self.lm.captured.states))
        try:
            self._connect(START_S)
        except OSError as error:
            raise HandoffError(f"prompts cannot be handed on to {self.path} ({error.strerror or error}); first start "
                               "`forebay serve` there with --role decode and the same --handoff") from error
        threading.Thread(target=self._listen, name="handoff", daemon=True).start()
        super().start()

    @property
    def fault(self) -> str:
        return super().fault or ("" if self._wire is not None else self.away)

    def submit(self, pending: Pending) -> None:
        """`Batcher.submit`; Refusal (503) while no process decodes."""
        if self._wire is None:
            raise Refusal(503, f"prompts have nowhere to go: {self.away}")
        super().submit(pending)

    def drain(self) -> None:
        super().drain()
        self._ended.set()

    def join(self, timeout_s: float | None = None) -> bool:
        ended = super().join(timeout_s)
        if ended and (wire := self._wire) is not None:
            wire.close()
        return ended

    def _scheduler(self, session: Session) -> Callable[..., Scheduler]:
        return partial(PrefillScheduler, handoff_slots(session, self.lm.captured.states), self._hand_on)

    @property
    def _room(self) -> int:
        """Requests that may be admitted: as many prompts as there are slots here wait for a slot there."""
        return self._slots + self.decode_slots - len(self.running)

    def _hand_on(self, number: int, request: Request, first: int, cache: Callable[[], torch.Tensor]) -> bool:
        if request.constraint is not None or request.on_logprobs is not None or request.features is not None or (
                number not in self.running):
            return False
        message = message_of(number, request, first, self.running[number].seed & (1 << 63) - 1)
        with self._changed:
            wire, self._elsewhere[number] = self._wire, [first]
        if wire is None:
            self._break_off([number])
            return True
        try:
            wire.send(message, cache())
        except OSError as error:
            self._lose(wire, error)
        return True

    # -- the process that decodes

    def _connect(self, within_s: float = ANSWER_S) -> None:
        """Reach the process that decodes. OSError if there is none, if it has another model, or if it does not answer,
        as it decodes for another server."""
        at = socket.socket(socket.AF_UNIX)
        try:
            at.settimeout(within_s)
            at.connect(self.path)
            wire = Wire(at)
            wire.send(asdict(self._terms))
            decoding = Terms(**wire.receive()[0])
            if why := self._terms.mismatch(decoding):
                raise OSError(why)
            at.settimeout(None)
        except BaseException:
            at.close()
            raise
        with self._changed:
            self._wire, self.decode_slots = wire, decoding.batch_slots

    def _listen(self) -> None:
        """Take tokens until the end; reach a process anew after one has ended."""
        while not self._ended.is_set() or self._elsewhere:
            wire = self._wire
            try:
                if wire is None:
                    self._connect()
                    continue
                for number, token in wire.receive()[0]["tokens"]:
                    self._take(wire, number, token)
            except OSError as error:
                self._lose(wire, error)
                self._ended.wait(RETRY_S)

    def _take(self, wire: Wire, number: int, token: int) -> None:
        """The next token of a request that decodes there."""
        with self._changed:
            tokens = self._elsewhere.get(number)
            if tokens is None:
                return
            tokens.append(token)
            more = self._next(number, token)
            if more and token not in self.eos and len(tokens) < self.running[number].new_tokens:
                return
            del self._elsewhere[number]
            self._end(number, tokens)
            self._changed.notify_all()
        if not more:
            wire.send({"cancel": number})

    def _lose(self, wire: Wire | None, error: OSError) -> None:
        """The process that decodes is gone, or still is: those that decode there, and those that wait, are told."""
        with self._changed:
            if wire is not self._wire:
                return
            self.away = f"the process that decodes, at {self.path}, cannot be reached ({error.strerror or error})"
            if wire is not None:
                if not self._ended.is_set():
                    LOG.warning("%s", self.away)
                wire.close()
                self._wire = None
                self._break_off(list(self._elsewhere))
            self._refuse_waiting(Refusal(503, f"prompts have nowhere to go: {self.away}"))
            self._changed.notify_all()

    def _break_off(self, numbers: list[int]) -> None:
        """Tell requests that decode elsewhere that they are lost."""
        with self._changed:
            for number in numbers:
                del self._elsewhere[number]
                pending = self.running.pop(number)
                self._note_end(pending, "failed", Heard(refusal=Refusal(
                    500, "the process that decodes ended on the way; ask again"), tokens=len(pending.answer.ids)))

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            elsewhere, wire = list(self._elsewhere), self._wire
            self._elsewhere.clear()
        super()._fail(error)
        if wire is not None:
            try:
                for number in elsewhere:
                    wire.send({"cancel": number})
            except OSError as lost:
                self._lose(wire, lost)
