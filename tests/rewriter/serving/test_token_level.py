"""Iteration by iteration: against queues that have exact answers, by hand, and what must hold of any run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.rewriter.serving.phase_times import PhaseTimes
from forebay.rewriter.serving.served import Served
from forebay.rewriter.serving.token_level import InstanceLimits, token_level, token_level_tandem
from forebay.rewriter.serving.traffic import Arrival, Traffic, TrafficError, arrivals

# 1 ms a token of a prompt, steps of 10 ms and 1 ms a sequence, and 1 us per token of context.
TIMES = PhaseTimes(lambda batch, tokens, context: 0.001 * batch * tokens,
                   lambda batch, context: 0.01 + 0.001 * batch + 1e-6 * batch * context,
                   lambda batch, context, tokens, reached: 0.01 + 0.001 * (batch + tokens) + 1e-6 * batch * context)
FLAT = replace(TIMES, decode_s=lambda batch, context: 0.01)
ALONE = InstanceLimits(1, 100_000)
ROOMY = InstanceLimits(8, 100_000)


def waits(run: Served, service_s: np.ndarray) -> float:
    return float((run.last - run.arrived - service_s).mean())


def test_answers_of_one_token_are_an_md1_queue() -> None:
    found = []
    for seed in range(6):
        requests = arrivals(Traffic(0.6, 6000, 1000, 1), seed)
        found.append(waits(token_level(requests, TIMES, 1, ALONE), np.ones(6000)))
    assert np.mean(found) == pytest.approx(0.6 / (2 * 0.4), rel=0.05)


def test_unequal_answers_are_an_mg1_queue() -> None:
    """Pollaczek and Khinchine's mean wait, of the moments that were drawn, where one at a time is prefilled and
    decoded."""
    found, wanted = [], []
    for seed in range(4):
        requests = arrivals(Traffic(0.5, 6000, 500, 51, length_cv=0.7), seed)
        service = np.array([0.001 * r.prompt + 0.01 * (r.output - 1) for r in requests])
        found.append(waits(token_level(requests, FLAT, 1, ALONE), service))
        wanted.append(0.5 * float((service**2).mean()) / (2 * (1 - 0.5 * float(service.mean()))))
    assert np.mean(found) == pytest.approx(np.mean(wanted), rel=0.08)


@pytest.mark.parametrize(("prompt", "output"), [(1000, 51), (500, 101)])
def test_two_constant_servers_in_tandem_wait_as_the_slower_alone(prompt: int, output: int) -> None:
    """Friedman 1965: whoever waits in a tandem of constant servers waits as long as before the slowest of them."""
    requests = arrivals(Traffic(0.7, 4000, prompt, output), 3)
    run = token_level_tandem(requests, (FLAT, 1, ALONE), (FLAT, 1, ALONE), lambda tokens: 0.0)
    slowest, free = max(0.001 * prompt, 0.01 * (output - 1)), 0.0
    for request, end in zip(requests, run.last, strict=True):
        wait = max(0.0, free - request.at_s)
        free = request.at_s + wait + slowest
        assert end == pytest.approx(request.at_s + wait + 0.001 * prompt + 0.01 * (output - 1), abs=1e-6)


def test_by_hand() -> None:
    """A prompt that comes in the middle is taken at the next step's border; the last token ends a sequence."""
    requests = [Arrival(0.0, 100, 5), Arrival(0.125, 100, 2)]
    run = token_level(requests, FLAT, 1, InstanceLimits(2, 1000))
    assert list(run.first) == pytest.approx([0.1, 0.23])
    assert list(run.last) == pytest.approx([0.24, 0.24])
    chunked = token_level(requests, TIMES, 1, InstanceLimits(2, 1000, chunk=50))
    assert chunked.first[0] == pytest.approx(2 * (0.01 + 0.05))
    one = 0.01 + 0.001 + 1e-6 * 101  # alone, until the second prompt is there at 0.125, of which 49 + 49 + 2 follow
    steps = [0.01 + 0.001 * 50 + 1e-6 * 102, 0.01 + 0.001 * 50 + 1e-6 * 103, 0.01 + 0.001 * 3 + 1e-6 * 104]
    assert chunked.last[0] == chunked.first[1] == pytest.approx(0.12 + one + sum(steps))


def test_jumps_are_the_same_as_single_steps() -> None:
    """Bounding a jump to one step, by an arrival before each, gives the times that jumps give."""
    requests = arrivals(Traffic(2.0, 50, 200, 40, length_cv=0.5), 1)
    far = [Arrival(r.at_s, r.prompt, r.output) for r in requests]
    ticks = [Arrival(0.005 * i, 1, 1) for i in range(20_000)]
    both = sorted([*far, *ticks], key=lambda r: r.at_s)
    nothing = PhaseTimes(lambda batch, tokens, context: 0.0 if tokens == 1 else 0.2, TIMES.decode_s, TIMES.mixed_s)
    alone = token_level(far, nothing, 1, InstanceLimits(1000, 10**7))
    among = token_level(both, nothing, 1, InstanceLimits(1000, 10**7))
    own = [i for i, r in enumerate(both) if (r.prompt, r.output) != (1, 1)]
    assert np.allclose(alone.last, among.last[own], atol=0.02)


def test_a_full_cache_sends_the_youngest_back_and_never_overflows() -> None:
    requests = [Arrival(0.001 * i, 64, 200) for i in range(8)]
    tight = InstanceLimits(8, 640)
    run = token_level(requests, TIMES, 1, tight)
    assert run.preempted > 0 and run.most_cached <= 640
    assert np.isfinite(run.last).all()
    roomy = token_level(requests, TIMES, 1, ROOMY)
    assert roomy.preempted == 0 and roomy.most_cached > 640 and roomy.last.max() < run.last.max()


def test_what_was_sent_back_goes_before_what_waits() -> None:
    """The second loses its cache to the first; a third, for which there would be room, does not overtake it."""
    requests = [Arrival(0.0, 64, 200), Arrival(0.0, 64, 200), Arrival(0.5, 16, 2)]
    run = token_level(requests, TIMES, 1, InstanceLimits(2, 400, prompt_tokens=100))
    assert run.preempted == 1 and run.first[2] > run.last[0] + 0.001 * 190  # after the second's prefill, begun again


def test_a_prompt_waits_for_one_step_at_most() -> None:
    """Though steps grow, so that fewer of them pass until it comes than the first one's length says."""
    growing = replace(TIMES, decode_s=lambda batch, context: 0.001 + 1e-4 * context)
    requests = [Arrival(0.0, 1, 2000), Arrival(40.0, 1, 2)]
    run = token_level(requests, growing, 1, ROOMY)
    step = 0.001 + 1e-4 * 1000  # longer than the one under way: about 890 tokens are there after 40 s
    assert 0 < run.first[1] - 40.0 - 0.001 <= step


def test_a_shared_prefix_is_computed_and_kept_once() -> None:
    requests = [Arrival(0.0, 512, 32) for _ in range(8)]
    apart = token_level(requests, TIMES, 1, ROOMY)
    shared = token_level(requests, TIMES, 1, replace(ROOMY, shared_prefix=480))
    assert shared.most_cached <= apart.most_cached - 7 * 480
    again = [Arrival(10.0 * i, 512, 2) for i in range(2)]
    run = token_level(again, TIMES, 1, replace(ROOMY, shared_prefix=480))
    assert list(run.ttft_s) == pytest.approx([0.512, 0.032])


def test_chunks_keep_steps_short() -> None:
    """Who decodes ends before a long prompt does, which then takes longer."""
    requests = [Arrival(0.0, 10, 60), Arrival(0.5, 2000, 2)]
    whole, chunked = (token_level(requests, TIMES, 1, replace(ROOMY, chunk=chunk)) for chunk in (0, 64))
    assert chunked.last[0] < 0.7 * whole.last[0] and chunked.first[1] > whole.first[1]


@given(st.integers(0, 10**6), st.integers(1, 3), st.sampled_from([0, 40]), st.sampled_from([0, 64]),
       st.integers(30, 120), st.booleans())
@settings(max_examples=40, deadline=None)
def test_what_holds_of_every_run(seed: int, instances: int, chunk: int, prefix: int, blocks: int, tandem: bool) -> None:
    requests = arrivals(Traffic(3.0, 40, 150, 20, length_cv=0.6), seed)
    need = max(r.prompt + r.output for r in requests) + 32
    limits = InstanceLimits(6, max(need, 16 * blocks), chunk=chunk, shared_prefix=prefix)
    if tandem:
        run = token_level_tandem(requests, (TIMES, instances, replace(limits, chunk=0)), (TIMES, 1, limits),
                                 lambda tokens: 1e-5 * tokens)
    else:
        run = token_level(requests, TIMES, instances, limits)
    prompts = np.array([r.prompt for r in requests])
    assert np.isfinite(run.first).all() and np.isfinite(run.last).all()  # as many leave as came
    assert run.most_cached <= limits.cache_tokens
    assert (run.first - run.arrived >= 0.001 * (prompts - (prefix // 16 * 16)) - 1e-9).all()
    assert (run.last - run.first >= 0.011 * (run.outputs - 1) * (run.preempted == 0) - 1e-9).all()
    inside = np.sort(np.concatenate([run.arrived, run.last]))
    count = np.searchsorted(np.sort(run.arrived), inside, "right") - np.searchsorted(np.sort(run.last), inside, "right")
    assert float(count[:-1] @ np.diff(inside)) == pytest.approx(float((run.last - run.arrived).sum()))  # Little


def test_load_hurts_instances_help_and_a_seed_repeats() -> None:
    def run(rate: float, instances: int) -> Served:
        return token_level(arrivals(Traffic(rate, 1500, 200, 30, length_cv=0.3), 5), TIMES, instances, ROOMY)

    slow, fast, more = run(1.0, 1), run(3.5, 1), run(3.5, 2)
    for of in ("ttft_s", "tpot_s"):
        assert getattr(slow, of).mean() < getattr(fast, of).mean() > getattr(more, of).mean()
    assert run(3.5, 2).digest() == more.digest()


@pytest.mark.parametrize(("limits", "named"), [
    (InstanceLimits(1, 255), "takes 250 tokens"), (InstanceLimits(0, 9000), "batch"),
    (InstanceLimits(64, 9000, chunk=64), "chunk")])
def test_what_can_never_be_served_is_refused(limits: InstanceLimits, named: str) -> None:
    with pytest.raises(TrafficError, match=named):
        token_level([Arrival(0.0, 200, 50)], TIMES, 1, limits)
