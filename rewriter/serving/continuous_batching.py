"""The server of this package simulated step by step: sequences enter and leave the slots of one plan as
`runtime.run.scheduler.answer_arriving` lets them, by the same `StepTurns`."""

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


def simulate_slots(
    requests: Sequence[Arrival], times: StepTimes, turns: StepTurns = DEFAULT_TURNS,
    pace: Callable[[float, int], float] = lambda at_s, tokens: 1.0,
) -> Served:
    """Requests through the slots of a plan. At `at_s` a step over so many tokens per sequence takes `pace` times what
    `times` say. TrafficError where a request has no room in any slot."""
    for r in requests:
        if r.prompt > times.prompt or r.prompt + r.output - 1 > times.context:
            raise TrafficError(f"a request of {r.prompt} and {r.output} tokens has no room in slots of {times.prompt} "
                               f"of prompt and {times.context} in all; longer ones (--prompt, --new-tokens) have")
    desk, order = _Desk(times, turns), sorted(range(len(requests)), key=lambda i: (requests[i].at_s, i))
    first, last = [math.nan] * len(requests), [math.nan] * len(requests)
    now, at = 0.0, 0
    while at < len(order) or desk.busy:
        if not desk.busy:
            now = max(now, requests[order[at]].at_s)
        room = desk.free - len(desk.waiting)
        while room > 0 and at < len(order) and requests[order[at]].at_s <= now:
            request = requests[order[at]]
            desk.waiting.append(_Seat(order[at], request.prompt, 0, request.output))
            at, room = at + 1, room - 1
        took, tokens, told = desk.step()
        now += took * pace(now, tokens)
        for seat in told:
            if math.isnan(first[seat.index]):
                first[seat.index] = now
            if not seat.left:
                last[seat.index] = now
        desk.leave()
    return served(requests, first, last)
