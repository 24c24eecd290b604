"""What a plan's Programs are expected to take, from their timelines on the virtual device."""

from __future__ import annotations

from collections.abc import Mapping

from forebay.rewriter.ir.plan import Plan, Prediction
from forebay.rewriter.ir.program import Program, workspace_nbytes
from forebay.rewriter.predict.simulate import Timeline


def prediction_of(plan: Plan, programs: Mapping[int, Program], lines: Mapping[int, Timeline]) -> Prediction:
    """The prediction of `plan`, whose steps over one token and over its largest chunk are `programs`, by tokens."""
    chunk = plan.schedule.prefill_chunk
    passes = -(-plan.workload.prompt // chunk) * plan.schedule.block.prefills(plan.workload.batch)
    launches = [launch for program in programs.values() for launch in program.launches()]
    peak = {tier: nbytes + workspace_nbytes(launches, tier) for tier, nbytes in plan.arenas.items()}
    return Prediction(
        prefill_time_s=passes * lines[chunk].time_s, decode_time_s=lines[1].time_s, busy_time_s=lines[1].busy_time_s,
        streamed_nbytes=programs[1].moved_nbytes(), peak_nbytes=peak, bottleneck=lines[1].bottleneck)
