"""Choose whether drafted tokens are checked, several in one step, and how many, by plans made for each way."""

from __future__ import annotations

from forebay.rewriter.ir.plan import Budget, Plan, PlanError
from forebay.rewriter.pipeline import Pipeline
from forebay.rewriter.planning.wishes import Wishes

SIZES = (16, 8, 4, 2)  # tokens per sequence of steps that check drafts
FREE = 1.05  # times a decode step: a step that takes no more may check drafts however few of them are right
LOSS = 1.02  # times the decode step of a plan without such steps: what their memory may cost at most


def plan_speculation(pipeline: Pipeline, plan: Plan, budget: Budget, wishes: Wishes) -> tuple[Pipeline, Plan]:
    """The plan of `pipeline` for `budget`, or one whose steps check drafted tokens beside, with the pipeline of its
    Programs.

    Of the steps that `wishes` allow the planner takes ("auto") those that are predicted to take hardly longer than a
    decode step, as they do where the weights that stream bind it, and none where the memory for them would have made
    decoding slower. With a number of drafted tokens they are taken whatever they cost; PlanError where there can be
    none.
    """
    if wishes.drafted_tokens is None:
        return pipeline, plan
    forced = wishes.drafted_tokens != "auto"
    sizes = _sizes(pipeline, plan, wishes)
    try:
        if plan.schedule.block.staged or plan.schedule.block.entering:
            raise PlanError("drafted_tokens: caches that come to the device for their turns, and places that sequences "
                            "enter, have no steps that check drafts; leave it out, or keep the cache on the device "
                            "with a larger budget")
        if not sizes:
            raise PlanError(f"drafted_tokens: an answer of {plan.workload.new_tokens} tokens leaves nothing to draft; "
                            "leave it out")
        found = pipeline.with_speculative(sizes)
        drafting = found.plan(budget, wishes)
    except PlanError:
        if forced:
            raise
        return pipeline, plan
    if forced:
        return found, drafting
    kept = tuple(size for size, time_s in zip(sizes, drafting.prediction.speculative_times_s, strict=True)
                 if time_s <= FREE * plan.prediction.decode_time_s)
    if kept and kept != sizes:
        found = pipeline.with_speculative(kept)
        drafting = found.plan(budget, wishes)  # less memory than what there was a plan for
    pays = kept and drafting.prediction.decode_time_s <= LOSS * plan.prediction.decode_time_s
    return (found, drafting) if pays else (pipeline, plan)


def _sizes(pipeline: Pipeline, plan: Plan, wishes: Wishes) -> tuple[int, ...]:
    """The sizes that steps may have, the largest first: none that a chunk of the prompt must have, and none longer than
    an answer."""
    if isinstance(wishes.drafted_tokens, int):
        sizes = [wishes.drafted_tokens + 1]
        while sizes[-1] > 3:
            sizes.append(-(-sizes[-1] // 2))
    else:
        sizes = [*SIZES]
    taken = {wishes.prefill_chunk, min(plan.schedule.prefill_chunk, pipeline.workload.prompt)}
    return tuple(size for size in sizes if 1 < size <= pipeline.workload.new_tokens and size not in taken)
