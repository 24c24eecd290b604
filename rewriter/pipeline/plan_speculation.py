"""Choose whether drafted tokens are checked, several in one step, and how many, by plans made for each way."""

from __future__ import annotations

from dataclasses import replace

from forebay.rewriter.capture.step_graphs import StepGraphs
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Workload
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.options import Options

VERIFY_SIZES = (16, 8, 4, 2)  # tokens per sequence of steps that check drafts
MAX_VERIFY_RATIO = 2.0  # times a decode step: what takes longer has to check much that is right, and seldom does
MAX_DECODE_REGRESSION = 1.02  # times the decode step of a plan without such steps: what their memory may cost at most


def plan_speculation(pipeline: Pipeline, plan: Plan, budget: Budget, options: Options) -> tuple[Pipeline, Plan]:
    """The plan of `pipeline` for `budget`, or one whose steps check drafted tokens beside, with the pipeline of its
    Programs.

    Of the steps that `options` allow the planner takes ("auto") those that are predicted to take at most
    `MAX_VERIFY_RATIO` times as long as a decode step, as they do where reading weights binds it, and none where the
    memory for them would have made decoding slower. Which of them a pass takes, if any, is decided when it runs
    (`DraftChoice`). With a number of drafted tokens they are taken whatever they cost; PlanError where there can be
    none.
    """
    if options.prompt_lookup_num_tokens is None or options.sparse_values < 1:
        return pipeline, plan
    if options.prompt_lookup_num_tokens != "auto":
        if plan.schedule.speculative_steps and plan.budget == budget.limits:
            return pipeline, plan  # `plan_block` has planned these steps already
        checking = pipeline.with_speculative(forced_sizes(pipeline.graphs, pipeline.workload, options))
        return checking, checking.plan(budget, options)
    sizes = () if pipeline.graphs.speculate is None else _sizes(pipeline, plan, options)
    while sizes:
        found = pipeline.with_speculative(sizes)
        try:
            drafting = found.plan(budget, options)
        except PlanError:
            sizes = sizes[1:]
            continue
        kept = tuple(size for size, time_s in zip(sizes, drafting.prediction.speculative_times_s, strict=True)
                     if time_s <= MAX_VERIFY_RATIO * plan.prediction.decode_time_s)
        pays = _pays(drafting, plan)
        if not pays and kept == sizes:
            drafting = _in_slots_of(plan, found, budget, options) or drafting
            pays = _pays(drafting, plan)
        if kept == sizes and pays:
            return found, drafting
        sizes = kept if kept != sizes else sizes[1:]
    return pipeline, plan


def forced_sizes(graphs: StepGraphs, workload: Workload, options: Options) -> tuple[int, ...]:
    """Find the steps that a number of drafted tokens asks for.

    Returns:
        Tokens per sequence of each, the largest first; none where `options` name no number.

    Raises:
        PlanError: The model or the request has no such step, whatever the budget.
    """
    if not isinstance(options.prompt_lookup_num_tokens, int) or options.sparse_values < 1:
        return ()
    if graphs.speculate is None:
        raise PlanError("prompt_lookup_num_tokens: no step checks drafts in models whose rotary follows the length "
                        "of the call; leave it out")
    chunk = min(options.prefill_chunk or 1, workload.prompt)
    sizes = tuple(n for n in _wished_sizes(options) if 1 < n <= workload.new_tokens and n != chunk)
    beside_prompt = tuple(n for n in sizes if n != workload.prompt)
    if not (beside_prompt or (sizes and not options.entering)):
        raise PlanError(f"prompt_lookup_num_tokens: {_no_size(workload, options)}")
    return beside_prompt or sizes  # a prompt in one step is worth more than a size


def smallest_checking(pipeline: Pipeline, options: Options) -> int:
    """Find the least device budget, in bytes, of a plan with the steps of `forced_sizes`.

    Raises:
        PlanError: There is none, whatever the budget.
    """
    return pipeline.with_speculative(forced_sizes(pipeline.graphs, pipeline.workload, options)).smallest_budget(options)


def _no_size(workload: Workload, options: Options) -> str:
    least = _wished_sizes(options)[-1]
    if least > workload.new_tokens:
        return f"an answer of {workload.new_tokens} tokens leaves nothing to draft; leave it out"
    return (f"steps over {least} tokens compute the prompt, in chunks of as many; name another number, or another "
            "prefill_chunk")


def _wished_sizes(options: Options) -> list[int]:
    """The sizes that steps are to have, the largest first."""
    assert isinstance(options.prompt_lookup_num_tokens, int)
    sizes = [options.prompt_lookup_num_tokens + 1]
    while sizes[-1] > 3:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def _pays(drafting: Plan, plan: Plan) -> bool:
    """Whether a decode step is no more slower than memory for steps that check may make it."""
    return drafting.prediction.decode_time_s <= MAX_DECODE_REGRESSION * plan.prediction.decode_time_s


def _in_slots_of(plan: Plan, pipeline: Pipeline, budget: Budget, options: Options) -> Plan | None:
    """A plan of `pipeline` whose weights come in pieces as large, and as many ahead, as those of `plan`: what else the
    planner takes for a little less memory can take a few percent longer. None where there is none."""
    s = plan.schedule
    if not s.slots:
        return None
    try:
        return pipeline.plan(budget, replace(options, slots=s.slots, slot_nbytes=s.slot_nbytes, lead=s.lead))
    except PlanError:
        return None


def _sizes(pipeline: Pipeline, plan: Plan, options: Options) -> tuple[int, ...]:
    """The sizes that steps may have, the largest first: no chunk of the prompt, and none longer than an answer."""
    taken = {options.prefill_chunk, min(plan.schedule.prefill_chunk, pipeline.workload.prompt)}
    return tuple(size for size in VERIFY_SIZES if size <= pipeline.workload.new_tokens and size not in taken)
