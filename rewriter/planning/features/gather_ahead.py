"""Memory for weights that ranks gather before they are read, tried where a plan has none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.gather_ahead import GatherAhead
from forebay.rewriter.planning.features.feature import ScheduleFeature, ScheduleRequest, Trial
from forebay.rewriter.planning.objective import latency_s
from forebay.rewriter.predict.estimator import MachineEstimator

GATHER_BUFFERS = 2  # one that is read, one that is gathered; more keep activations waiting behind what comes early
MIN_GAIN = 0.01  # of the time of prompt and answer, that this must save


def gather_ahead(best: Plan, trial: Trial) -> Plan:
    """The plan with memory for weights that ranks gather ahead, where there are such and prompt and answer are then
    predicted to take less time: by what gathers take from the products beside them less than their Programs say."""
    shown = 1 - MachineEstimator(trial.machine).overlap_penalty
    batching = best.schedule.batching
    if batching.cache.staged or trial.options.gather_buffers is not None or not trial.graphs.gathers or shown <= 0:
        return best
    ahead = trial.simulate(replace(batching, gathering=GatherAhead(GATHER_BUFFERS)))
    gains = ahead is not None and shown * (latency_s(best) - latency_s(ahead)) > MIN_GAIN * latency_s(best)
    return ahead if ahead is not None and gains else best


def asked_buffers(batching: BatchSchedule, request: ScheduleRequest) -> Iterator[BatchSchedule]:
    """Memory as is asked for, where caches stay on the device."""
    yield batching if request.staged else replace(
        batching, gathering=GatherAhead(request.options.gather_buffers or 0))


GATHER_AHEAD = ScheduleFeature("gathering", candidates=asked_buffers, improve=gather_ahead)
