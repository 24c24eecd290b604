"""The server's loop, simulated: against the loop itself on a clock that its steps advance, and by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from forebay.rewriter.ir.plan import Limits, Plan, Schedule, Workload
from forebay.rewriter.ir.schedule.admission import Admission
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.turns import DEFAULT_TURNS, SERVER_TURNS, StepTurns
from forebay.rewriter.predict.of_programs import StepTimes
from forebay.rewriter.serving.continuous_batching import simulate_apart, simulate_slots
from forebay.rewriter.serving.traffic import Arrival, Traffic, TrafficError, arrivals
from forebay.runtime.run.request import Request
from forebay.runtime.run.scheduler import answer_arriving

TIMES = StepTimes(4, 1, 32, 48, (16, 8), {1: (0.5, 0.5), 8: (1.0, 1.0), 16: (1.75, 1.75)})


class ClockedSession:
    """Computes nothing; a step takes its time on the clock."""

    rope_switch_length, rewindable, prefixes = 0, True, None
    device = SimpleNamespace(queues=False)

    def __init__(self, times: StepTimes) -> None:
        batching = BatchSchedule(admission=Admission(times.admitted))
        work = Workload(times.batch_slots, times.prompt, times.context - times.prompt + 1)
        self.plan = Plan("f", "m", Limits(1 << 20), work, Schedule(prefill_chunks=times.chunks, batching=batching), ())
        self.times, self.now = times, 0.0

    def step(self, inputs: Any) -> torch.Tensor:
        rows, tokens = inputs.input_ids.shape
        self.now += self.times.seconds[tokens][0]
        return torch.zeros(rows, 2)


def run_by_the_loop(requests: Sequence[Arrival], times: StepTimes, turns: StepTurns) -> tuple[list[float], list[float]]:
    """Times of first and last tokens, as `answer_arriving` gives them, and the server's queue before it."""
    session: Any = ClockedSession(times)
    first, last, queue = {}, {}, list(range(len(requests)))

    def arriving(free: int, idle: bool) -> dict[int, Request] | None:
        if idle and not queue:
            return None
        if idle:
            session.now = max(session.now, requests[queue[0]].at_s)
        came = {}
        while queue and len(came) < free and requests[queue[0]].at_s <= session.now:
            i = queue.pop(0)
            came[i] = Request(torch.zeros(requests[i].prompt, dtype=torch.int64), requests[i].output)
        return came

    told: list[int] = []

    def on_next(number: int, token: int) -> bool:
        told.append(number)
        return True

    def on_step(work: Any) -> None:
        for number in told:
            first.setdefault(number, session.now)
            last[number] = session.now
        told.clear()

    answer_arriving(session, arriving, on_next=on_next, on_end=lambda number, new: None, on_step=on_step, turns=turns)
    return [first[i] for i in range(len(requests))], [last[i] for i in range(len(requests))]


@pytest.mark.parametrize("turns", [DEFAULT_TURNS, StepTurns(0.0, 1), StepTurns(0.0, 3), StepTurns(0.5, 2),
                                   SERVER_TURNS])
@pytest.mark.parametrize("admitted", [1, 2, 3])
def test_the_simulation_is_what_the_loop_does(admitted: int, turns: StepTurns) -> None:
    times = replace(TIMES, admitted=admitted)
    for seed, rate in enumerate((0.05, 0.4, 3.0)):
        chance = random.Random(seed)
        requests = [replace(r, prompt=chance.randint(1, 32), output=chance.randint(1, 16))
                    for r in arrivals(Traffic(rate, 40, 1, 1), seed)]
        run, (first, last) = simulate_slots(requests, times, turns), run_by_the_loop(requests, times, turns)
        assert list(run.first) == pytest.approx(first) and list(run.last) == pytest.approx(last)


def test_what_steps_see_takes_time() -> None:
    """Of 4 slots of 48 tokens; a chunk's is that of the one that enters."""
    times = replace(TIMES, seconds={1: (1.0, 49.0), 8: (2.0, 50.0), 16: (4.0, 52.0)})
    run = simulate_slots([Arrival(0.0, 20, 3)], times)
    prefill = 4.0 + 16 + 2.0 + 20  # seconds a token that one place sees: 1
    assert list(run.first) == pytest.approx([prefill])
    assert list(run.last) == pytest.approx([prefill + 2 * 1.0 + 0.25 * (21 + 22)])


def test_goals_of_answers_hold_chunks_up() -> None:
    """With few chunks between, answers come sooner and first tokens later; all are served either way."""
    requests = arrivals(Traffic(0.15, 400, 32, 3), 0)
    greedy, fair = simulate_slots(requests, TIMES), simulate_slots(requests, TIMES, StepTurns(0.0, 1))
    assert np.percentile(fair.tpot_s, 90) < 0.5 * np.percentile(greedy.tpot_s, 90)
    assert np.percentile(fair.ttft_s, 90) > np.percentile(greedy.ttft_s, 90)
    for run in (greedy, fair):
        assert not np.isnan(run.last).any() and (run.first > run.arrived).all() and (run.last >= run.first).all()


def test_a_long_prompt_starves_nobody() -> None:
    """Steps are counted: while a prompt of 64 chunks is computed, answers go on, those that come have their first
    tokens after few chunks, and the prompt has every other chunk, though short ones never end. Of two long ones none
    overtakes the other."""
    times = StepTimes(4, 1, 64, 72, (1,), {1: (1.0, 1.0)})  # every step takes a second
    shorts = [Arrival(2.0 + 6 * i, 1, 2) for i in range(30)]
    requests = [Arrival(0.0, 1, 60), Arrival(0.5, 64, 2), *shorts]
    for run in (run_by_the_loop(requests, times, SERVER_TURNS), simulate_slots(requests, times, SERVER_TURNS)):
        first, last = run if isinstance(run, tuple) else (list(run.first), list(run.last))
        assert last[0] <= 1 + 3 * 59  # at most two chunks before each further token
        assert max(first[2 + i] - each.at_s for i, each in enumerate(shorts)) <= 4
    endless = [*requests[:2], *(Arrival(1.0 + i, 1, 1) for i in range(400))]
    assert run_by_the_loop(endless, times, SERVER_TURNS)[0][1] <= 2 * 64 + 60 + 4  # every other chunk, and the answer
    late = run_by_the_loop(requests, times, DEFAULT_TURNS)[0]
    assert late[2] > 64 and late[3] > 64
    alike = [Arrival(0.0, 64, 1), Arrival(0.0, 64, 1), Arrival(0.0, 2, 1)]
    first = run_by_the_loop(alike, times, SERVER_TURNS)[0]
    assert first == [66, 130, 4]


def test_prompts_and_answers_of_two_processes() -> None:
    """By hand: prompts one after the other, steps of half a second for all; caches take a second there and
    a second here. No more requests are under way than both have slots."""
    prefill, decode = replace(TIMES, batch_slots=1), replace(TIMES, batch_slots=1)
    requests = [Arrival(0.0, 16, 3), Arrival(0.5, 16, 1), Arrival(0.5, 10, 2)]
    run = simulate_apart(requests, prefill, decode, moved_s=1 / 16)
    assert list(run.first) == pytest.approx([1.75, 4.5, 6.25])
    assert list(run.last) == pytest.approx([2.75 + 1 + 2 * 0.5, 4.5, 6.875 + 10 / 16 + 0.5])
    run = simulate_apart(requests[:1], prefill, decode, clocks=(lambda at, n, s: 2 * s, lambda at, n, s: 3 * s))
    assert list(run.last) == [2 * 1.75 + 3 * 2 * 0.5]
    slow = replace(decode, seconds={1: (100.0, 100.0)})
    run = simulate_apart([Arrival(0.0, 8, 2) for _ in range(4)], prefill, slow)
    assert list(run.first) == [1.0, 2.0, 102.0, 202.0] and list(run.last) == [101.0, 201.0, 301.0, 401.0]


@pytest.mark.parametrize("rate", [0.05, 0.4, 3.0])
def test_two_processes_with_room_compute_all(rate: float) -> None:
    chance = random.Random(1)
    requests = [replace(r, prompt=chance.randint(1, 32), output=chance.randint(1, 16))
                for r in arrivals(Traffic(rate, 60, 1, 1), 1)]
    run = simulate_apart(requests, TIMES, TIMES, SERVER_TURNS)
    alone = simulate_slots([replace(r, output=1) for r in requests], TIMES, SERVER_TURNS)
    assert (run.first >= alone.first - 1e-9).all() and (run.last >= run.first).all()
    if rate < 0.1:  # slots are never short
        assert list(run.first) == pytest.approx(list(alone.first))
    assert (run.tpot_s >= 0.5).all()


def test_what_has_no_room_is_refused() -> None:
    for prompt, output in ((33, 1), (32, 18)):
        with pytest.raises(TrafficError, match=f"a request of {prompt} and {output} tokens has no room"):
            simulate_slots([Arrival(0.0, prompt, output)], TIMES)
    simulate_slots([Arrival(0.0, 32, 17)], TIMES)
