"""What fits poorly is measured again, that alone, and the best fit counts."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from forebay.rewriter.machine.quality import GOOD_R2
from forebay.runtime.measure.kernels import call_times_s
from forebay.runtime.measure.steady import CALM, TRIES, settled_rate, settled_s, steady_link, steady_times

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)


def _link(disturbed: int) -> tuple[float, float, float, int]:
    """A link of 1 GB/s of whose passes over the sizes the first `disturbed` are of times that have nothing to do with
    the size; and the number of transfers."""
    calls = 0

    def time_s(nbytes: int, turn: int) -> float:
        nonlocal calls
        calls += 1
        if (calls - 1) // (5 * len(SIZES)) < disturbed:
            return 1e-3 * (1 + (calls * 7919) % 13) / math.log2(nbytes)
        return 1e-5 + nbytes / 1e9

    return *steady_link(SIZES, 5, time_s), calls


def test_a_good_fit_is_measured_once() -> None:
    bandwidth, latency, r2, calls = _link(0)
    assert calls == 5 * len(SIZES) and r2 > 0.999
    assert math.isclose(bandwidth, 1e9, rel_tol=1e-6) and math.isclose(latency, 1e-5, rel_tol=1e-3)


def test_a_disturbed_link_is_measured_again() -> None:
    bandwidth, _, r2, calls = _link(2)
    assert calls == 3 * 5 * len(SIZES) and r2 > 0.999 and math.isclose(bandwidth, 1e9, rel_tol=1e-6)


def test_a_link_that_stays_poor_says_so() -> None:
    _, _, r2, calls = _link(TRIES)
    assert calls == TRIES * 5 * len(SIZES) and r2 < GOOD_R2


def test_a_link_that_stays_poor_is_as_it_was_seen_in_most_turns() -> None:
    """Of three passes, of which none fits, alone or with the others: not the slowest, not the best."""
    slow_s = iter((1.0, 3.0, 2.0))
    times: list[float] = []

    def time_s(nbytes: int, turn: int) -> float:
        if nbytes == SIZES[0] and not turn:
            times[:] = [next(slow_s)] * 5
        return times[0] * {SIZES[0]: 0.02, SIZES[1]: 9.0, SIZES[2]: 0.01, SIZES[3]: 4.0}[nbytes]

    bandwidth, latency, r2 = steady_link(SIZES, 5, time_s)
    assert r2 < GOOD_R2
    assert math.isclose(bandwidth, SIZES[3] / 8.0) and math.isclose(latency, 0.04)


def test_passes_that_each_fit_poorly_may_fit_together() -> None:
    """In each pass another size is disturbed in most of its turns."""
    calls = 0

    def time_s(nbytes: int, turn: int) -> float:
        nonlocal calls
        once = calls // (5 * len(SIZES))
        calls += 1
        disturbed = nbytes == SIZES[3 - once] and turn < 3
        return (1e-5 + nbytes / 1e9) * (30.0 if disturbed else 1.0)

    bandwidth, latency, r2 = steady_link(SIZES, 5, time_s)
    assert calls == 2 * 5 * len(SIZES) and r2 > 0.999
    assert math.isclose(bandwidth, 1e9, rel_tol=1e-6) and math.isclose(latency, 1e-5, rel_tol=1e-3)


def test_only_lines_that_fit_poorly_are_measured_again() -> None:
    asked: list[set[tuple[str, int]]] = []

    def measure(timed: dict[tuple[str, int], None]) -> dict[tuple[str, int], float]:
        asked.append(set(timed))
        noisy = {16: 5.0, 64: 0.2} if len(asked) < 3 else {}
        return {(name, n): n * (noisy.get(n, 1.0) if name == "b" else 1.0) for name, n in timed}

    keys = {(name, n): None for name in "ab" for n in (1, 4, 16, 64)}
    found = steady_times(keys, measure, lambda key: (key[0], (key[1],)))
    assert asked == [set(keys), {("b", n) for n in (1, 4, 16, 64)}, {("b", n) for n in (1, 4, 16, 64)}]
    assert found == {(name, n): float(n) for name, n in keys}


def test_a_line_of_which_nothing_was_measured_is_not_measured_again() -> None:
    keys = {(name, n): None for name in "ab" for n in (1, 4)}
    found = steady_times(keys, lambda timed: {key: float(key[1]) for key in timed if key[0] == "a"},
                         lambda key: (key[0], (key[1],)))
    assert found == {("a", 1): 1.0, ("a", 4): 4.0}


@pytest.mark.parametrize(("slow", "kept"), [([0.5, 1e-3, 1e-3], True), ([0.5, 0.4, 0.5], False)])
def test_an_implementation_is_left_out_where_it_is_slow_each_time(slow: list[float], kept: bool) -> None:
    """Not where another process interrupted its first call for longer than any interruption is expected to take."""
    given = iter(slow)
    timed = {(name, "f", n): [partial(str, name)] for n in (1, 4) for name in ("fast", "slow")}
    found = call_times_s(timed, 1, lambda turn, count: 1e-3 if next(turn)() == "fast" else next(given, 1e-3))
    assert (("slow", "f", 4) in found) == kept


@pytest.mark.parametrize("call_us", [20, 600])
def test_short_calls_are_timed_while_threads_are_awake(monkeypatch: pytest.MonkeyPatch, call_us: int) -> None:
    """Threads that find no work for 50 us fall asleep; a call that wakes them takes 40 us more. Binding takes 90 us."""
    now, idle_since = [0.0], [-1.0]

    def call() -> None:
        now[0] += 1e-6 * (call_us + 40 * (now[0] - idle_since[0] > 50e-6))
        idle_since[0] = now[0]

    def bound() -> Iterator[Callable[[], None]]:
        while True:
            now[0] += 90e-6
            yield call

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    found = call_times_s({("flat", "w4g32"): bound()}, 3)
    assert found["flat", "w4g32"] == pytest.approx(call_us * 1e-6)


def test_a_worse_second_measurement_does_not_count() -> None:
    times = ((1.0, 3.0, 30.0, 40.0), (9.0, 1.0, 7.0, 2.0), (8.0, 1.0, 1.0, 1.0))
    passes = [dict(zip((1, 4, 16, 64), found, strict=True)) for found in times]
    given = iter(passes)
    found = steady_times(dict.fromkeys((1, 4, 16, 64)), lambda _: next(given), lambda n: ("line", (n,)))
    assert found == passes[0]


@pytest.mark.parametrize("seed", range(3))
def test_the_fastest_counts_where_others_added_time_and_the_median_where_not(seed: int) -> None:
    rng = random.Random(seed)
    calm = [1.0 + 0.1 * rng.random() for _ in range(9)]
    assert settled_s(calm) == statistics.median(calm)
    used = [1.0, *(CALM + 3 * rng.random() for _ in range(8))]
    rng.shuffle(used)
    assert settled_s(used) == 1.0 and settled_rate([1 / t for t in used]) == pytest.approx(1.0)
