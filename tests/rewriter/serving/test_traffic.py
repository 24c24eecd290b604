"""Requests as they arrive: moments of what is drawn, traces, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forebay.rewriter.serving.traffic import Arrival, Traffic, TrafficError, arrivals, mean_lengths, read_trace

PLAIN = Traffic(2.0, 20_000, 200, 50)


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 2.0])
def test_gaps_have_the_mean_and_the_spread_that_were_asked_for(cv: float) -> None:
    gaps = np.diff([0.0, *(r.at_s for r in arrivals(replace(PLAIN, arrival_cv=cv), 1))])
    assert gaps.mean() == pytest.approx(0.5, rel=0.05) and gaps.std() == pytest.approx(0.5 * cv, rel=0.06, abs=1e-9)


def test_lengths_too() -> None:
    found = arrivals(replace(PLAIN, length_cv=0.5), 1)
    for of, mean in (([r.prompt for r in found], 200), ([r.output for r in found], 50)):
        assert np.mean(of) == pytest.approx(mean, rel=0.03) and np.std(of) == pytest.approx(mean / 2, rel=0.05)
        assert min(of) >= 1
    assert {(r.prompt, r.output) for r in arrivals(PLAIN, 1)} == {(200, 50)}


def test_a_seed_and_a_rate_say_it_all() -> None:
    one, twice = arrivals(PLAIN, 3), arrivals(replace(PLAIN, rate=4.0), 3)
    assert one == arrivals(PLAIN, 3) != arrivals(PLAIN, 4)
    assert [r.at_s for r in one] == pytest.approx([2 * r.at_s for r in twice])


def test_a_trace_is_replayed_at_the_rate(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 3.0, "prompt": 30, "output": 3}\n\n{"arrival": 1.0, "prompt": 10, "output": 1}\n'
                    '{"arrival": 1.5, "prompt": 11, "output": 5}\n', encoding="utf-8")
    trace = read_trace(path)
    assert trace == (Arrival(1.0, 10, 1), Arrival(1.5, 11, 5), Arrival(3.0, 30, 3)) and mean_lengths(trace) == (17, 3)
    found = arrivals(Traffic(10.0, 6000, 1, 1, trace=trace), 0)
    assert [r.prompt for r in found[:4]] == [10, 11, 30, 10]
    assert found[-1].at_s == pytest.approx(600, rel=0.01)
    assert found[1].at_s * 4 == pytest.approx(found[2].at_s)


def test_what_arrives_at_once_comes_again_as_a_burst() -> None:
    burst = arrivals(Traffic(10.0, 6, 1, 1, trace=(Arrival(7.0, 10, 1), Arrival(7.0, 11, 1))), 0)
    assert [r.at_s for r in burst] == pytest.approx([0, 0, 0.2, 0.2, 0.4, 0.4])
    alone = arrivals(Traffic(10.0, 3, 1, 1, trace=(Arrival(7.0, 10, 1),)), 0)
    assert [r.at_s for r in alone] == pytest.approx([0, 0.1, 0.2])


@pytest.mark.parametrize(("line", "named"), [
    ("nonsense", "not JSON"), ("[1]", "an object"), ('{"prompt": 1, "output": 1}', "arrival"),
    ('{"arrival": 0, "prompt": 0, "output": 1}', "prompt"), ('{"arrival": 0, "prompt": 1, "output": "x"}', "output"),
    ('{"arrival": -1, "prompt": 1, "output": 1}', "arrival"), ('{"arrival": NaN, "prompt": 1, "output": 1}', "arrival"),
    ("", "no requests"), ('{"arrival": 1e308, "prompt": 1, "output": 1}', "arrival")])
def test_a_wrong_trace_is_refused_by_line_and_field(line: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(TrafficError, match=named):
        read_trace(path)


@pytest.mark.parametrize("changed", [{"rate": 0.0}, {"rate": float("nan")}, {"count": 0}, {"prompt": 0}, {"output": -1},
                                     {"arrival_cv": -0.1}, {"length_cv": float("inf")}])
def test_traffic_that_cannot_be_meant_is_refused(changed: dict) -> None:
    with pytest.raises(TrafficError):
        arrivals(replace(PLAIN, **changed), 0)
