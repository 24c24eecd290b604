"""The server of this package simulated step by step: sequences enter and leave the slots of one plan as
`runtime.run.scheduler.answer_arriving` lets them, by the same `StepTurns`; and two processes, of which one computes
prompts and the other one decodes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forebay.rewriter.ir.turns import DEFAULT_TURNS, StepTurns
from forebay.rewriter.predict.of_programs import StepTimes
from forebay.rewriter.serving.served import Served, served
from forebay.rewriter.serving.traffic import Arrival, TrafficError


@dataclass(eq=False)
class _Seat:
    """A request in a place: tokens of its prompt, tokens in its cache, tokens of its answer to come."""

    index: int
    prompt: int
    cached: int
    left: int


@dataclass(eq=False)
class _Admitted:
    """Requests that were admitted together, `done` tokens of whose prompts are computed."""

    seats: list[_Seat]
    done: int = 0

    @property
    def left(self) -> int:
        """Tokens of the longest prompt that are not computed."""
        return max(seat.prompt for seat in self.seats) - self.done


@dataclass
class _Desk:
    """The slots of a plan, whose steps take `times`; `waiting` are those that the loop has taken from the queue,
    `entering` those whose prompts are on their way, the last chunk of which was of some that had `overtaken` others."""

    times: StepTimes
    turns: StepTurns
    waiting: deque[_Seat] = field(default_factory=deque)
    entering: list[_Admitted] = field(default_factory=list)
    running: list[_Seat] = field(default_factory=list)
    held: int = 0
    overtaken: bool = False

    @property
    def free(self) -> int:
        return self.times.batch_slots - len(self.running) - sum(len(group.seats) for group in self.entering)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.entering or self.running)

    def arrive(self, requests: Sequence[Arrival], order: Sequence[int], at: int, now: float, elsewhere: int = 0) -> int:
        """Take requests from the place `at` of `order` on that have arrived, as far as slots are free; the place of the
        next one. So many as hold slots `elsewhere` beyond those that are free there count as here."""
        room = self.free - len(self.waiting) - max(0, elsewhere)
        while room > 0 and at < len(order) and requests[order[at]].at_s <= now:
            request = requests[order[at]]
            self.waiting.append(_Seat(order[at], request.prompt, 0, request.output))
            at, room = at + 1, room - 1
        return at

    def begin(self) -> None:
        left = [self._chunks(group.left) for group in self.entering]
        next_ones = [seat for seat in self.waiting if self.turns.admits(self._chunks(seat.prompt), left)]
        most = min(self.times.admitted, len(next_ones))
        if most and self.free >= most:
            self.entering.append(_Admitted(next_ones[:most]))
            for seat in next_ones[:most]:
                self.waiting.remove(seat)

    def _chunks(self, tokens: int) -> int:
        return -(-tokens // max(self.times.chunks))

    def step(self) -> tuple[float, int, list[_Seat]]:
        """The next step: its seconds, its tokens per sequence, and who has a token more behind it."""
        self.begin()
        if self.entering and self.turns.prefills(self.held, len(self.running), self.times.batch_slots):
            self.held += 1
            return self.chunk(self.entering[0 if self.overtaken else -1])
        self.held = 0
        seen = sum(group.done * len(group.seats) for group in self.entering)
        seen += sum(seat.cached + 1 for seat in self.running)
        return self.times.decode_s(seen), 1, self.decode()

    def chunk(self, group: _Admitted) -> tuple[float, int, list[_Seat]]:
        self.overtaken = group is not self.entering[0]
        chunk, longest = self.times.chunk_for(group.left), group.left + group.done
        group.done = max(0, min(group.done, longest - chunk)) + chunk
        took = self.times.prefill_s(chunk, group.done)
        if group.left > 0:
            return took, chunk, []
        self.entering.remove(group)
        for seat in group.seats:
            seat.cached, seat.left = seat.prompt, seat.left - 1
        self.running += group.seats
        return took, chunk, group.seats

    def decode(self) -> list[_Seat]:
        for seat in self.running:
            seat.cached, seat.left = seat.cached + 1, seat.left - 1
        return list(self.running)

    def leave(self) -> None:
        self.running = [seat for seat in self.running if seat.left]


# Seconds of a step that begins at a time, over so many tokens per sequence, which is predicted to take so many.
StepDuration = Callable[[float, int, float], float]


def as_predicted(at_s: float, tokens: int, predicted_s: float) -> float:
    """Return what a step is predicted to take, at any time."""
    return predicted_s


def simulate_slots(
    requests: Sequence[Arrival], times: StepTimes, turns: StepTurns = DEFAULT_TURNS, clock: StepDuration = as_predicted
) -> Served:
    """Requests through the slots of a plan, whose steps take `times` by this `clock`. TrafficError where a request has
    no room in any slot."""
    _refuse_long(requests, times)
    desk, order = _Desk(times, turns), sorted(range(len(requests)), key=lambda i: (requests[i].at_s, i))
    first, last = [math.nan] * len(requests), [math.nan] * len(requests)
    now, at = 0.0, 0
    while at < len(order) or desk.busy:
        if not desk.busy:
            now = max(now, requests[order[at]].at_s)
        at = desk.arrive(requests, order, at, now)
        took, tokens, told = desk.step()
        now += clock(now, tokens, took)
        for seat in told:
            if math.isnan(first[seat.index]):
                first[seat.index] = now
            if not seat.left:
                last[seat.index] = now
        desk.leave()
    return served(requests, first, last)


def simulate_apart(
    requests: Sequence[Arrival], prefill: StepTimes, decode: StepTimes, turns: StepTurns = DEFAULT_TURNS,
    clocks: tuple[StepDuration, StepDuration] = (as_predicted, as_predicted), moved_s: float = 0.0,
) -> Served:
    """Requests whose prompts one process computes, and whose further tokens another one (`forebay serve --role`). As
    many requests are under way as both have slots. The cache of a token takes `moved_s` of a prefill step, and as long
    of a decode step. TrafficError as of `simulate_slots`."""
    _refuse_long(requests, prefill)
    order = sorted(range(len(requests)), key=lambda i: (requests[i].at_s, i))
    first, last = [math.nan] * len(requests), [math.nan] * len(requests)
    here, there, slots = _Desk(prefill, turns), _Desk(decode, turns), prefill.batch_slots + decode.batch_slots
    handed: deque[tuple[float, _Seat]] = deque()
    now, then, at = 0.0, 0.0, 0
    while at < len(order) or here.busy or handed or there.running:
        away = len(handed) + len(there.running)
        open_ = at < len(order) and away < slots
        come = now if here.busy else max(now, requests[order[at]].at_s) if open_ else math.inf
        ready = then if there.running else max(then, handed[0][0]) if handed else math.inf
        if come <= ready:
            now, at = come, here.arrive(requests, order, at, come, away - decode.batch_slots)
            took, tokens, told = here.step()
            now += clocks[0](come, tokens, took)
            here.running.clear()
            for seat in told:
                first[seat.index] = last[seat.index] = now
            for seat in (seat for seat in told if seat.left):
                now += moved_s * seat.prompt
                handed.append((now, seat))
            continue
        moved = 0
        while handed and handed[0][0] <= ready and there.free:
            there.running.append(handed.popleft()[1])
            moved += there.running[-1].prompt
        took, _, told = there.step()
        then = ready + clocks[1](ready, 1, took) + moved_s * moved
        for seat in told:
            last[seat.index] = then
        there.leave()
        if away >= slots:
            now = max(now, then)
    return served(requests, first, last)


def _refuse_long(requests: Sequence[Arrival], times: StepTimes) -> None:
    for r in requests:
        if r.prompt > times.prompt or r.prompt + r.output - 1 > times.context:
            raise TrafficError(f"a request of {r.prompt} and {r.output} tokens has no room in slots of {times.prompt} "
                               f"of prompt and {times.context} in all; longer ones (--prompt, --new-tokens) have")
