"""Contestants compute one at a time, all for as long, and their clocks stand still while others do."""

from __future__ import annotations

import itertools
import time
from functools import partial

import pytest

from benchmarks.taking_turns import Turns, in_turns

STEPS = {"a": 40, "b": 25, "c": 40}


def test_one_computes_at_a_time_and_waiting_does_not_count() -> None:
    seen: list[str] = []
    inside = 0

    def contestant(name: str, turns: Turns) -> float:
        nonlocal inside
        began = turns.clock(name)
        for _ in range(STEPS[name]):
            inside += 1
            assert inside == 1
            seen.append(name)
            time.sleep(0.002)
            assert inside == 1
            inside -= 1
            turns.step(name)
        return turns.clock(name) - began

    began = time.monotonic()
    found = in_turns({name: partial(contestant, name) for name in STEPS}, turn_s=0.01)
    whole = time.monotonic() - began
    assert {name: seen.count(name) for name in STEPS} == STEPS
    assert all(took >= 0.002 * STEPS[name] for name, took in found.items()) and sum(found.values()) <= whole + 0.01
    stretches = [name for name, _ in itertools.groupby(seen)]
    assert len(stretches) > 2 * len(STEPS)  # they alternate
    assert stretches[:3] == list(STEPS)


def test_an_error_of_one_is_raised_when_the_others_have_ended() -> None:
    ended = []

    def fails(turns: Turns) -> None:
        raise ValueError("lost")

    def goes_on(turns: Turns) -> None:
        for _ in range(5):
            time.sleep(0.002)
            turns.step("other")
        ended.append(1)

    with pytest.raises(ValueError, match="lost"):
        in_turns({"one": fails, "other": goes_on}, turn_s=0.001)
    assert ended == [1]
