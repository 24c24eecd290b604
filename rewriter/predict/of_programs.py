"""What a plan is expected to take, by its Programs on the virtual device."""

from __future__ import annotations

from collections.abc import Callable

from forebay.rewriter.ir.plan import Plan, Prediction
from forebay.rewriter.ir.program import Program, workspace_nbytes
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.predict.simulate import STEPS, simulate


def predict(plan: Plan, program: Callable[[int], Program], machine: Machine) -> Prediction:
    """Seconds, streamed bytes and peak bytes of `plan`, whose step over so many tokens is `program`, on `machine`."""
    s, chunk = plan.schedule, plan.schedule.prefill_chunk
    passes = -(-plan.workload.prompt // chunk)  # of a prefill, which need not reach its steady state
    programs = {tokens: program(tokens) for tokens in sorted({1, chunk, *s.speculative_steps})}
    lines = {tokens: simulate(each, machine, min(STEPS, passes) if s.phase_of(tokens) == "prefill" else STEPS)
             for tokens, each in programs.items()}
    launches = [launch for each in programs.values() for launch in each.launches()]
    peak = {tier: nbytes + workspace_nbytes(launches, tier) for tier, nbytes in plan.arenas.items()}
    return Prediction(
        prefill_time_s=passes * s.block.prefills(plan.workload.batch) * lines[chunk].time_s,
        decode_time_s=lines[1].time_s, busy_time_s=lines[1].busy_time_s, streamed_nbytes=programs[1].moved_nbytes(),
        peak_nbytes=peak, bottleneck=lines[1].bottleneck,
        speculative_times_s=tuple(lines[tokens].time_s for tokens in s.speculative_steps))
