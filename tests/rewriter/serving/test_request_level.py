"""The paper's simulators against queues whose answers are known, and what must hold of any of them."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from forebay.rewriter.serving.collocated import collocated
from forebay.rewriter.serving.phase_times import PhaseTimes
from forebay.rewriter.serving.request_level import decode_ends, disaggregated, prefill_ends, pseudo_batch
from forebay.rewriter.serving.served import Served
from forebay.rewriter.serving.traffic import Arrival, Traffic, arrivals

FIXED = PhaseTimes(lambda batch, tokens, context: 1.0, lambda batch, context: 0.1, lambda *of: 1.1)
LINEAR = PhaseTimes(lambda batch, tokens, context: 0.5 * batch, lambda batch, context: 0.05 + 0.01 * batch,
                    lambda *of: 1.0)


def traffic(rate: float, count: int = 1000) -> Traffic:
    return Traffic(rate, count, 100, 11)


@pytest.mark.parametrize(("running", "batch"), [(0, 1), (3, 1), (4, 2), (9, 4), (15, 6)])
def test_the_pseudo_batch_is_equation_9(running: int, batch: int) -> None:
    assert pseudo_batch(running) == batch


def test_one_instance_and_batches_of_one_are_an_md1_queue() -> None:
    """Mean wait of M/D/1 (Pollaczek and Khinchine): rho S / 2 (1 - rho)."""
    waits = []
    for seed in range(8):
        requests = arrivals(traffic(0.6, 6000), seed)
        ends = prefill_ends(requests, FIXED, 1, 1, random.Random(seed))
        waits.append(np.mean([end - r.at_s - 1 for end, r in zip(ends, requests, strict=True)]))
    assert np.mean(waits) == pytest.approx(0.6 / (2 * 0.4), rel=0.05)


def test_prefill_follows_algorithm_2_by_hand() -> None:
    requests = [Arrival(at, 100, 2) for at in (0.0, 0.1, 0.2, 0.3, 5.0)]
    assert prefill_ends(requests, FIXED, 1, 2, random.Random(0)) == [1.0, 2.0, 2.0, 3.0, 6.0]
    assert sorted(prefill_ends(requests, FIXED, 2, 2, random.Random(0))) == pytest.approx([1.0, 1.1, 2.0, 2.0, 6.0])


def test_decode_follows_algorithm_3_by_hand() -> None:
    requests = [Arrival(0.0, 100, 11) for _ in range(3)]
    assert decode_ends(requests, [0.0, 0.5, 0.6], FIXED, 1, 2, random.Random(0)) == [1.0, 1.5, 2.0]


def test_a_collocated_prefill_puts_answers_off() -> None:
    """One instance, answers of 1 s: the second prompt at 1.5 puts the first answer off, the third follows on it."""
    requests = [Arrival(at, 100, 11) for at in (0.0, 1.5, 2.0)]
    run = collocated(requests, FIXED, 1, 1, 0)
    assert list(run.first) == [1.0, 2.5, 3.5]
    assert run.last[0] == pytest.approx(3.0)  # from 1.0, 1 s of decoding, put off by the second prefill only
    assert collocated(requests, FIXED, 1, 1, 0, every_prefill=True).last[0] == pytest.approx(4.0)


def both(rate: float, instances: int, seed: int) -> list[Served]:
    requests = arrivals(replace(traffic(rate), length_cv=0.4), seed)
    tandem = disaggregated(requests, (LINEAR, instances, 4), (LINEAR, instances, 4), seed, lambda prompt: 0.01)
    return [tandem, collocated(requests, LINEAR, instances, 4, seed),
            collocated(requests, LINEAR, instances, 4, seed, every_prefill=True)]


@pytest.mark.parametrize("seed", range(3))
def test_what_holds_of_every_run(seed: int) -> None:
    for run in both(1.2, 2, seed):
        assert (run.first >= run.arrived + 0.5 - 1e-9).all()  # none before it arrives and has been prefilled
        assert (run.last >= run.first).all() and np.isfinite(run.last).all()
        assert (run.last - run.first)[run.outputs > 1].min() >= 0.06 - 1e-9
        # Little's law, of the prefill: the area under the number that waits is the sum of their times.
        times = np.sort(np.concatenate([run.arrived, run.first]))
        there = np.searchsorted(np.sort(run.arrived), times, "right") - np.searchsorted(np.sort(run.first), times,
                                                                                         "right")
        assert (there >= 0).all()
        assert float(there[:-1] @ np.diff(times)) == pytest.approx(float(run.ttft_s.sum()))


def test_load_hurts_and_instances_help() -> None:
    def means(rate: float, instances: int) -> list[float]:
        return [float(np.mean([both(rate, instances, seed)[i].ttft_s.mean() for seed in range(2)])) for i in range(2)]

    for slow, fast, more in zip(means(1.0, 2), means(1.8, 2), means(1.8, 3), strict=True):
        assert slow < fast and more < fast


def test_a_seed_gives_the_same_run_again() -> None:
    again = [[run.digest() for run in both(1.2, 2, seed)] for seed in (1, 1, 2)]
    assert again[0] == again[1] and again[0] != again[2]
