"""Measurements of a job, as numbers and as text: time by stage, memory against the budget's promise, bytes read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from forebay.commands.process_memory import MemoryWatch, beside_nbytes, calls_of
from forebay.drafting import plans_in_budget
from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.durations import format_seconds
from forebay.rewriter.ir.plan import Plan

if TYPE_CHECKING:
    from forebay.commands.jobs import Ask
    from forebay.commands.prompts import Prompt
    from forebay.language_model import LanguageModel
    from forebay.runtime.run.progress import WorkDone


@dataclass
class Spent:
    """Seconds of a job by what they went into: waits for resident weights, steps over prompts, steps over answers."""

    load_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def mark(self, name: str, since: float) -> float:
        """Count the time from `since` until now, which is returned, to `name`."""
        now = time.monotonic()
        setattr(self, name, getattr(self, name) + now - since)
        return now

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count seconds that were counted to `source` to `target`."""
        setattr(self, source, getattr(self, source) - seconds)
        setattr(self, target, getattr(self, target) + seconds)


def constant_nbytes(lm: LanguageModel, memory: MemoryWatch, prompts: Sequence[Prompt], answers: int, ask: Ask, *,
                    traced: bool, images_nbytes: int) -> int:
    """Bytes that a job takes in addition to its budget, as `process_memory` lists them."""
    calls = sum(calls_of(part.steps.pipeline, part.plan) for part in (lm, lm.helper) if part)
    calls += 0 if lm.shared_draft is None else len(lm.shared_draft.program.step)
    beside = beside_nbytes(calls, answers, sum(len(prompt.ids) for prompt in prompts),
                           lm.captured.vocab_size if ask.sampling.do_sample else 0, traced=traced)
    return memory.before + beside + images_nbytes + (0 if lm.prefixes is None else lm.prefixes.most_nbytes)


def job_measures(lm: LanguageModel, done: WorkDone, spent: Spent, elapsed_s: float, memory: MemoryWatch,
                 read_nbytes: int, constant: int) -> dict[str, Any]:
    """Bytes and seconds of a job, planned and measured, of its model and its draft model; `constant` bytes are promised
    in addition to the budget."""
    plan, *_ = plans = plans_in_budget(lm)
    grown, steps = memory.peak - memory.before, done.prefills + done.decodes
    return {
        "answers": done.ended, "tokens": done.tokens, "steps": steps, "time_s": elapsed_s, **asdict(spent),
        "drafted_tokens": done.offered, "accepted_tokens": done.accepted,
        "batch_slots": plan.workload.batch, "tokens_per_s": done.tokens / elapsed_s, "steps_per_s": steps / elapsed_s,
        "budget_nbytes": sum(map(_given, plans)),
        "planned_peak_nbytes": sum(sum(each.prediction.peak_nbytes.values()) for each in plans),
        "measured_peak_nbytes": grown + memory.cached_peak, "anonymous_nbytes": grown,
        "python_nbytes": memory.before, "page_cache_nbytes": memory.cached_peak, "process_peak_nbytes": memory.peak,
        "constant_nbytes": constant, "promised_nbytes": sum(map(_given, plans)) + constant,
        "streamed_nbytes_per_step": plan.prediction.streamed_nbytes, "read_nbytes": read_nbytes}


def _given(plan: Plan) -> int:
    """Bytes of the budget, with the host memory that is planned where there is no limit of it."""
    return plan.budget.device + (plan.arenas.get("host", 0) if plan.budget.host is None else plan.budget.host)


def measures_text(measured: dict[str, Any]) -> str:
    """Three lines at the end of a job, and one of drafts where there were some."""
    size = {name: format_nbytes(value) for name, value in measured.items() if "nbytes" in name}
    time = {name: format_seconds(measured[name]) for name in ("time_s", "load_s", "prefill_s", "decode_s")}
    return "\n".join((
        f"speed       {measured['answers']} answers, {measured['tokens']} tokens in {time['time_s']}: "
        f"{measured['tokens_per_s']:.3g} tokens/s (load {time['load_s']}, prefill {time['prefill_s']}, decode "
        f"{time['decode_s']})",
        *([f"drafts      {measured['accepted_tokens']} of {measured['drafted_tokens']} drafted tokens accepted; "
           f"{measured['tokens'] / measured['steps']:.2f} tokens per pass over the weights"]
          if measured["drafted_tokens"] else []),
        f"memory      the plan used {size['planned_peak_nbytes']} of the budget of {size['budget_nbytes']}; the "
        f"process, Python included, used {size['process_peak_nbytes']} of the {size['promised_nbytes']} expected",
        f"streamed    {size['streamed_nbytes_per_step']} per decode step as planned; {size['read_nbytes']} read from "
        "disk in all",
    ))
