"""Counters of the server add up as their names say."""

from __future__ import annotations

from forebay.serving.metrics import Metrics


def test_steps_and_their_seconds_are_of_one_kind() -> None:
    """A step that computes prompts and decodes as well is a prefill in both: a mean of decode steps is then theirs."""
    metrics = Metrics()
    for prefills, decodes, time_s in ((1, 0, 1.0), (1, 1, 2.0), (1, 1, 4.0), (0, 1, 0.5)):
        metrics.steps(prefills, decodes, time_s)
    lines = metrics.text({}).splitlines()
    for kind, steps, seconds in (("prefill", 3, 7.0), ("decode", 1, 0.5)):
        assert f'forebay_steps_total{{kind="{kind}"}} {steps}' in lines
        assert f'forebay_step_seconds_total{{kind="{kind}"}} {seconds}' in lines
