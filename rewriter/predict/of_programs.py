"""Predictions of a plan by its Programs on the virtual device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from forebay.rewriter.ir.plan import Plan, Prediction
from forebay.rewriter.ir.prefill_chunks import chunk_steps
from forebay.rewriter.ir.program import COMPUTE, Program, workspace_nbytes
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.predict.simulate import STEPS, simulate


def usually_seen(plan: Plan, tokens: int) -> float:
    """Tokens that the last of a step over so many attends to, on average."""
    return plan.workload.before(tokens, plan.schedule.batching) + tokens


def predict(
    plan: Plan, program: Callable[[int], Program], machine: Machine, growth: Program | None = None
) -> Prediction:
    """Seconds, streamed bytes and peak bytes of `plan`, whose step over so many tokens is `program`, on `machine`. What
    runs between prompt and answer, `growth`, counts as the prompt's."""
    s, work, serial = plan.schedule, plan.workload, MachineEstimator(machine).serial
    chunks = chunk_steps(work.effective_lengths(s.batching)[0], s.prefill_chunks)
    passes = sum(chunks.values())  # of a prefill, which need not reach its steady state
    programs = {tokens: program(tokens) for tokens in sorted({1, s.prefill_chunk, *chunks, *s.speculative_steps})}
    lines = {tokens: simulate(each, machine, min(STEPS, passes) if s.phase_of(tokens) == "prefill" else STEPS)
             for tokens, each in programs.items()}
    busy = {tokens: line.busy_time_s.get(COMPUTE, 0.0) for tokens, line in lines.items()}
    prompt_s = sum(count * lines[tokens].time_s for tokens, count in chunks.items())
    grown_s = 0.0 if growth is None else simulate(growth, machine, 1).time_s
    launches = [launch for each in programs.values() for launch in each.launches()]
    peak = {tier: nbytes + workspace_nbytes(launches, tier) for tier, nbytes in plan.arenas.items()}
    return Prediction(
        prefill_time_s=s.batching.admission.prefills(work.batch) * prompt_s + grown_s,
        decode_time_s=lines[1].time_s, busy_time_s=lines[1].busy_time_s, streamed_nbytes=programs[1].moved_nbytes(),
        peak_nbytes=peak, bottleneck=lines[1].bottleneck,
        speculative_times_s=tuple(lines[tokens].time_s for tokens in s.speculative_steps),
        speculative_busy_s=tuple(busy[tokens] for tokens in s.speculative_steps if serial),
        prefill_busy_s=s.batching.admission.prefills(work.batch) * sum(
            count * busy[tokens] for tokens, count in chunks.items() if serial))


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the steps of a plan whose slots sequences enter, by how much of the caches they see.

    `seconds` are, by tokens per sequence, those of a step that sees nothing of them and of one that sees all: what it
    takes lies between. `chunks` are the sizes of prefill steps, largest first, each over `admitted` sequences.
    """

    batch_slots: int
    admitted: int
    prompt: int
    context: int
    chunks: tuple[int, ...]
    seconds: Mapping[int, tuple[float, float]]

    def chunk_for(self, tokens: int) -> int:
        """Return `Schedule.chunk_for`."""
        return min((c for c in self.chunks if c >= tokens), default=self.chunks[0])

    def decode_s(self, seen: float) -> float:
        """A step of one token for all slots, which see so many tokens together."""
        return self._between(1, seen / (self.batch_slots * self.context))

    def prefill_s(self, chunk: int, reached: float) -> float:
        """A chunk up to `reached` tokens of each that enters."""
        return self._between(chunk, reached / self.context)

    def _between(self, tokens: int, share: float) -> float:
        nothing, everything = self.seconds[tokens]
        return nothing + min(1.0, share) * (everything - nothing)


@dataclass(frozen=True)
class _Blind(MachineEstimator):
    """A machine whose attention takes no time."""

    def attention_s(self, dtype: str, nbytes: float, flops: float) -> float:
        return 0.0


def step_times(plan: Plan, program: Callable[[int], Program], machine: Machine) -> StepTimes:
    """Predict the step times of `plan` on `machine`; `program` gives its step over so many tokens, each run after
    others of its kind."""
    s, w = plan.schedule, plan.workload
    programs = {tokens: program(tokens) for tokens in (1, *s.prefill_chunks)}
    seconds = {tokens: (simulate(each, machine, times=_Blind(machine)).time_s,
                        simulate(replace(each, seen={}), machine).time_s)
               for tokens, each in programs.items()}
    admitted = s.batching.admitted or w.batch
    return StepTimes(w.batch, admitted, w.prompt, w.context, s.prefill_chunks, seconds)
