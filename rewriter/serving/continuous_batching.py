"""The server of this package simulated step by step: sequences enter and leave the slots of one plan as
`runtime.run.scheduler.answer_arriving` lets them, by the same `StepTurns`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.rewriter.ir.turns import DEFAULT_TURNS, StepTurns
from forebay.rewriter.predict.of_programs import StepTimes
from forebay.rewriter.serving.served import Served, served
from forebay.rewriter.serving.traffic import Arrival, TrafficError


@dataclass
class _Seat:
    """A request in a place: tokens of its prompt, tokens in its cache, tokens of its answer to come."""

    index: int
    prompt: int
    cached: int
    left: int


@dataclass
class _Desk:
    """The slots of a plan, whose steps take `times`; `waiting` are those that the loop has taken from the queue,
    `entered` those whose prompts are on their way, `done` tokens of each."""

    times: StepTimes
    turns: StepTurns
    waiting: deque[_Seat] = field(default_factory=deque)
    entered: list[_Seat] = field(default_factory=list)
    running: list[_Seat] = field(default_factory=list)
    done: int = 0
    held: int = 0

    @property
    def free(self) -> int:
        return self.times.batch_slots - len(self.running) - len(self.entered)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.entered or self.running)

    def begin(self) -> None:
        most = min(self.times.admitted, len(self.waiting))
        if not self.entered and most and self.free >= most:
            self.entered, self.done = [self.waiting.popleft() for _ in range(most)], 0

    def step(self) -> tuple[float, list[_Seat]]:
        """The next step: its seconds, and who has a token more behind it."""
        self.begin()
        if self.entered and self.turns.prefills(self.held, len(self.running), self.times.batch_slots):
            self.held += 1
            return self.chunk()
        self.held = 0
        seen = self.done * len(self.entered) + sum(seat.cached + 1 for seat in self.running)
        return self.times.decode_s(seen), self.decode()

    def chunk(self) -> tuple[float, list[_Seat]]:
        longest = max(seat.prompt for seat in self.entered)
        chunk = self.times.chunk_for(longest - self.done)
        self.done = max(0, min(self.done, longest - chunk)) + chunk
        took = self.times.prefill_s(chunk, self.done)
        if self.done < longest:
            return took, []
        prefilled, self.entered = self.entered, []
        for seat in prefilled:
            seat.cached, seat.left = seat.prompt, seat.left - 1
        self.running += prefilled
        return took, prefilled

    def decode(self) -> list[_Seat]:
        for seat in self.running:
            seat.cached, seat.left = seat.cached + 1, seat.left - 1
        return list(self.running)

    def leave(self) -> None:
        self.running = [seat for seat in self.running if seat.left]


def simulate_slots(requests: Sequence[Arrival], times: StepTimes, turns: StepTurns = DEFAULT_TURNS) -> Served:
    """Requests through the slots of a plan. TrafficError where one has no room in any."""
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
        took, told = desk.step()
        now += took
        for seat in told:
            if math.isnan(first[seat.index]):
                first[seat.index] = now
            if not seat.left:
                last[seat.index] = now
        desk.leave()
    return served(requests, first, last)
