"""A thread that answers requests in the slots of a plan, as they arrive and leave, behind a bounded queue."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from forebay.commands.terminal import reason_of
from forebay.drafting import drafting_per_slot
from forebay.language_model import LanguageModel
from forebay.rewriter.ir.turns import SERVER_TURNS, StepTurns
from forebay.runtime.run.logits_processing import Constraint, TokenLogprobs
from forebay.runtime.run.next_turns import NextTurns
from forebay.runtime.run.progress import WorkDone
from forebay.runtime.run.request import Request
from forebay.runtime.run.room import fits
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.scheduler import Scheduler, answer_arriving
from forebay.runtime.run.session import Session
from forebay.runtime.run.step_inputs import PromptFeatures
from forebay.serving.answer_text import AnswerText
from forebay.serving.metrics import Metrics
from forebay.serving.refusal import Refusal

LOG = logging.getLogger("forebay")
TRIES = 3  # failures of the model one after the other, without an answer between them, until the server ends
STOPPING = "the server is stopping; ask another one"
RECENT = 64  # answers whose times are kept to be shown


@dataclass(frozen=True)
class Heard:
    """A message to a request: more of its text with log probabilities of its tokens, at the end why it ended, or the
    refusal in its place."""

    text: str = ""
    finish: str | None = None
    tokens: int = 0
    refusal: Refusal | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def last(self) -> bool:
        return self.finish is not None or self.refusal is not None


@dataclass(eq=False)
class Pending:
    """A request under way: its prompt, its draws, its text so far, and whom to tell. Times are `time.monotonic`'s, 0
    until they come."""

    ids: list[int]
    new_tokens: int
    sampling: Sampling
    seed: int
    answer: AnswerText
    hear: Callable[[Heard], None]  # called from the batcher's thread; must not wait
    constraint: Callable[[], Constraint] | None = None
    top_logprobs: int | None = None
    adapter: str = ""
    features: PromptFeatures | None = None  # of images
    priority: int = 0  # of those that wait, lower ones get a slot first
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of tokens that were not told yet
    arrived_s: float = field(default_factory=time.monotonic)
    entered_s: float = 0.0
    first_s: float = 0.0
    ended_s: float = 0.0
    left: bool = False  # nobody hears it any more
    cached: int = 0  # tokens of the prompt that were known before
    shows: bool = field(init=False)  # images

    def __post_init__(self) -> None:
        self.shows = self.features is not None

    def request(self) -> Request:
        return Request(torch.tensor(self.ids), self.new_tokens,
                     lambda: torch.Generator().manual_seed(self.seed & (1 << 63) - 1), self.sampling, self.constraint,
                     self.top_logprobs or 0, None if self.top_logprobs is None else self.logprobs.append,
                     self._note_cached, self.adapter, self._take_features if self.features is not None else None)

    def _take_features(self) -> PromptFeatures:
        features, self.features = self.features, None  # once: they take memory
        assert features is not None
        return features

    def _note_cached(self, tokens: int) -> None:
        self.cached = tokens

    def heard(self, finish: str | None = None) -> Heard:
        """Return the messages that were not delivered yet."""
        text = self.answer.tell(last=finish is not None)
        logprobs = tuple(self.logprobs) if text or finish else ()
        del self.logprobs[: len(logprobs)]
        return Heard(text, finish, len(self.answer.ids), None, logprobs)


class Batcher:
    """Answers requests from a thread of its own, from `start` until `drain`. `broken` says why it cannot go on, after
    which `on_broken` is called and whatever is submitted is refused."""

    def __init__(
        self, lm: LanguageModel, prompt: int, new_tokens: int, eos: frozenset[int], most_waiting: int,
        metrics: Metrics, on_broken: Callable[[], None] = lambda: None, turns: StepTurns = SERVER_TURNS,
    ) -> None:
        self.lm, self.eos, self.most_waiting, self.metrics = lm, eos, most_waiting, metrics
        self.prompt, self.new_tokens, self.on_broken, self.turns = prompt, new_tokens, on_broken, turns
        self.broken: BaseException | None = None
        self.recent: deque[Pending] = deque(maxlen=RECENT)
        self.running: dict[int, Pending] = {}
        self._turns = NextTurns()
        self._ahead: set[int] = set()  # numbers of requests that compute what next turns begin with
        self._waiting: deque[Pending] = deque()
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._draining = False
        self._failures = 0
        self._work = WorkDone()
        self._since_s = time.monotonic()  # of the step under way
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def fault(self) -> str:
        """Return why nothing can be answered; "" where it can."""
        return "" if self.broken is None else str(self.broken)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, pending: Pending) -> None:
        """Let a request wait for a place; Refusal (400, 429, 503) if none has room for it, if too many wait, or if none
        will come."""
        if not fits(self.lm.plan, len(pending.ids), pending.new_tokens, self.lm.captured.rope_switch_length):
            raise Refusal(400, f"a prompt of {len(pending.ids)} tokens and an answer of {pending.new_tokens} have no "
                          "room here; ask for less")
        with self._changed:
            if self.broken is not None:
                raise Refusal(503, f"the model failed: {self.broken}")
            if self._draining:
                raise Refusal(503, STOPPING)
            if len(self._waiting) >= self.most_waiting + max(0, self._slots - len(self.running)):
                raise Refusal(429, f"all {self._slots} slots are taken, and {len(self._waiting)} requests wait; try "
                              "again later, or start the server with a longer --queue", code="queue_full")
            self._waiting.insert(next((i for i, each in enumerate(self._waiting) if each.priority > pending.priority),
                                      len(self._waiting)), pending)
            self._changed.notify_all()

    @property
    def _slots(self) -> int:
        return self.lm.plan.workload.batch

    def leave(self, pending: Pending) -> None:
        """Nobody hears a request any more: it ends with its next token, or is not begun."""
        with self._changed:
            pending.left = True
            if pending in self._waiting:
                self._waiting.remove(pending)
                self._note_end(pending, "left")

    def drain(self) -> None:
        """Finish what runs, refuse what waits and what comes, and end the thread."""
        with self._changed:
            self._draining = True
            self._refuse_waiting(Refusal(503, STOPPING))
            self._changed.notify_all()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread's end, behind `drain`; whether it came."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        ended = False
        while not ended and self.broken is None:
            try:
                with (self.lm.running(1, self.prompt, self.new_tokens, continuous=True) as session,
                      drafting_per_slot(self.lm.helper, session) as drafter):
                    self._work, self._since_s = WorkDone(), time.monotonic()
                    answer_arriving(session, partial(self._arriving, session), self.eos, on_next=self._next,
                                    on_end=self._end, on_step=self._stepped, turns=self.turns, drafter=drafter,
                                    make=self._scheduler(session))
                ended = True
            except BaseException as error:
                self._fail(error)

    def _scheduler(self, session: Session) -> Callable[..., Scheduler]:
        """Return what makes the scheduler of a session."""
        return Scheduler

    @property
    def _room(self) -> int:
        """Requests that may be admitted, if slots are free."""
        return self._slots

    def _fail(self, error: BaseException) -> None:
        why = reason_of(error)
        LOG.warning("the model failed: %s", why)
        with self._changed:
            self._failures += 1
            refusal = Refusal(500, f"the model failed on the way: {why}; ask again")
            for pending in self.running.values():
                self._note_end(pending, "failed", Heard(refusal=refusal, tokens=len(pending.answer.ids)))
            self.running.clear()
            self._ahead.clear()
            if self._failures < TRIES and not self._draining:
                return
            self.broken = error
            self._refuse_waiting(Refusal(503, f"the model failed: {why}"))
        self.on_broken()

    def _refuse_waiting(self, refusal: Refusal) -> None:
        while self._waiting:
            self._note_end(self._waiting.popleft(), "refused", Heard(refusal=refusal))

    def _arriving(self, session: Session, free: int, idle: bool) -> dict[int, Request] | None:
        with self._changed:
            came: dict[int, Request] = {}
            while idle and not (self._waiting and self._room > 0) and not self._draining:
                if (ahead := self._turns.next(session.prefixes, self.lm.plan)) is not None:
                    self._ahead.add(number := next(self._numbers))
                    return {number: ahead}
                self._changed.wait()
                self._since_s = time.monotonic()
            if self._draining:
                return None
            while self._waiting and len(came) < free and self._room > 0:
                number, pending = next(self._numbers), self._waiting.popleft()
                pending.entered_s = time.monotonic()
                self.metrics.queued_s.note(pending.entered_s - pending.arrived_s)
                self.running[number] = pending
                came[number] = pending.request()
            return came

    def _next(self, number: int, token: int) -> bool:
        if number in self._ahead:
            return False
        pending = self.running[number]
        if pending.left:
            return False
        if not pending.first_s:
            pending.first_s = time.monotonic()
            self.metrics.first_s.note(pending.first_s - pending.arrived_s)
        try:
            more = pending.answer.add(token)
        except Exception as error:  # the tokenizer's; of no concern to the others
            pending.left = True
            pending.hear(Heard(refusal=Refusal(500, reason_of(error))))
            return False
        if more and len(pending.answer.ids) < pending.new_tokens and (heard := pending.heard()).text:
            pending.hear(heard)
        return more

    def _end(self, number: int, new: list[int]) -> None:
        self.lm.check_files()
        self._failures = 0
        if number in self._ahead:
            self._ahead.remove(number)
            return
        with self._changed:
            pending = self.running.pop(number)
        answer = pending.answer
        if not pending.shows:  # images are computed with a prompt that a client sends, not ahead
            self._turns.note([*pending.ids, *new], pending.adapter)
        if pending.left:
            self._note_end(pending, "left")
            return
        finish = "stop" if answer.stopped else "length"
        self._note_end(pending, finish, pending.heard(finish))

    def _note_end(self, pending: Pending, how: str, heard: Heard | None = None) -> None:
        pending.ended_s = time.monotonic()
        made = len(pending.answer.ids)
        if made > 1:
            self.metrics.token_s.note((pending.ended_s - pending.first_s) / (made - 1))
        self.metrics.ended(how, len(pending.ids) if pending.entered_s else 0, made, pending.cached)
        self.recent.append(pending)
        if heard is not None:
            pending.hear(heard)

    def _stepped(self, work: WorkDone) -> None:
        before, self._work = self._work, replace(work)
        since_s, self._since_s = self._since_s, time.monotonic()
        accepted, checked = work.accepted - before.accepted, work.offered - before.offered
        self.metrics.steps(work.prefills - before.prefills, work.decodes - before.decodes, self._since_s - since_s)
        self.metrics.drafts(accepted, checked - accepted)
