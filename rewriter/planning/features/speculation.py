"""Whether steps check drafted tokens, several in one step, and how many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from forebay.rewriter.capture.step_graphs import StepGraphs
from forebay.rewriter.ir.plan import Plan, PlanError, Workload
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.speculation import REPLAY, Speculation
from forebay.rewriter.planning.features.feature import ScheduleFeature, ScheduleRequest, Trial
from forebay.rewriter.planning.options import Options

VERIFY_SIZES = (16, 8, 4, 2)  # tokens per sequence of steps that check drafts
MAX_VERIFY_RATIO = 2.0  # times a decode step: what takes longer has to check much that is right, and seldom does
MAX_DECODE_REGRESSION = 1.02  # times the decode step of a plan without such steps: what their memory may cost at most


def speculating(batching: BatchSchedule, request: ScheduleRequest) -> Iterator[BatchSchedule]:
    """With a number of drafted tokens steps check them whatever they cost; PlanError where there can be none."""
    sizes = forced_sizes(request.graphs, request.workload.whole(batching), request.options)
    yield replace(batching, speculation=Speculation(sizes))


def try_speculation(best: Plan, trial: Trial) -> Plan:
    """The plan, or one whose steps check drafted tokens too, where the planner may choose ("auto").

    Taken are those that are predicted to take at most `MAX_VERIFY_RATIO` times as long as a decode step, as they do
    where reading weights binds it, and none where the memory for them would have made decoding slower. Which of them a
    pass takes, if any, is decided when it runs (`DraftChoice`).
    """
    if trial.options.prompt_lookup_num_tokens != "auto" or trial.options.kv_blocks < 1:
        return best
    sizes = () if trial.graphs.speculate is None else _sizes(best, trial.options)
    while sizes and (trial.graphs.rewindable or REPLAY in sizes):
        batching = replace(best.schedule.batching, speculation=Speculation(sizes))
        if (drafting := trial.simulate(batching)) is None:
            sizes = sizes[1:]
            continue
        kept = tuple(size for size, time_s in zip(sizes, drafting.prediction.speculative_times_s, strict=True)
                     if time_s <= MAX_VERIFY_RATIO * best.prediction.decode_time_s)
        pays = _pays(drafting, best)
        if not pays and kept == sizes:
            drafting = _in_slots_of(best, batching, trial) or drafting
            pays = _pays(drafting, best)
        if kept == sizes and pays:
            return drafting
        sizes = kept if kept != sizes else sizes[1:]
    return best


def forced_sizes(graphs: StepGraphs, workload: Workload, options: Options) -> tuple[int, ...]:
    """Find the steps that a number of drafted tokens asks for.

    Returns:
        Tokens per sequence of each, the largest first; none where `options` name no number.

    Raises:
        PlanError: The model or the request has no such step, whatever the budget.
    """
    if not isinstance(options.prompt_lookup_num_tokens, int) or options.kv_blocks < 1:
        return ()
    if graphs.speculate is None:
        raise PlanError("prompt_lookup_num_tokens: no step checks drafts in models whose rotary follows the length "
                        "of the call; leave it out")
    chunk = min(options.prefill_chunk or 1, workload.prompt)
    asked = {*_asked_sizes(options), *(() if graphs.rewindable else (REPLAY,))}
    sizes = tuple(n for n in sorted(asked, reverse=True) if 1 < n <= workload.new_tokens and n != chunk)
    needed = () if graphs.rewindable or options.admitted else (REPLAY,)
    beside_prompt = tuple(n for n in sizes if n != workload.prompt or n in needed)
    if not (beside_prompt or (sizes and not options.admitted)):
        raise PlanError(f"prompt_lookup_num_tokens: {_no_size(workload, options)}")
    if not graphs.rewindable and REPLAY not in (beside_prompt or sizes):
        raise PlanError(f"prompt_lookup_num_tokens: states of this model are replayed by steps over {REPLAY} tokens, "
                        "which compute the prompt here; name another prefill_chunk, or leave it out")
    return beside_prompt or sizes  # a prompt in one step is worth more than a size


def _no_size(workload: Workload, options: Options) -> str:
    least = _asked_sizes(options)[-1]
    if least > workload.new_tokens:
        return f"an answer of {workload.new_tokens} tokens leaves nothing to draft; leave it out"
    return (f"steps over {least} tokens compute the prompt, in chunks of as many; name another number, or another "
            "prefill_chunk")


def _asked_sizes(options: Options) -> list[int]:
    """The sizes that steps are to have, the largest first."""
    assert isinstance(options.prompt_lookup_num_tokens, int)
    sizes = [options.prompt_lookup_num_tokens + 1]
    while sizes[-1] > 3:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def _pays(drafting: Plan, plan: Plan) -> bool:
    """Return whether a decode step is no more slower than memory for steps that check may make it."""
    return drafting.prediction.decode_time_s <= MAX_DECODE_REGRESSION * plan.prediction.decode_time_s


def _in_slots_of(plan: Plan, batching: BatchSchedule, trial: Trial) -> Plan | None:
    """A plan of the schedule whose weights come in pieces as large, and as many ahead, as those of `plan`: what else
    the planner takes for a little less memory can take a few percent longer. None where there is none."""
    s = plan.schedule
    return trial.simulate(batching, replace(trial.options, slots=s.slots, slot_nbytes=s.slot_nbytes, lead=s.lead)) if (
        s.slots) else None


def _sizes(plan: Plan, options: Options) -> tuple[int, ...]:
    """The sizes that steps may have, the largest first: no chunk of the prompt, and none longer than an answer."""
    taken = {options.prefill_chunk, min(plan.schedule.prefill_chunk, plan.workload.prompt)}
    return tuple(size for size in VERIFY_SIZES if size <= plan.workload.new_tokens and size not in taken)


def explain_drafts(plan: Plan) -> tuple[str, str] | None:
    """Return which steps check drafts, and what they take."""
    sizes, times_s, one_s = plan.schedule.speculative_steps, plan.prediction.speculative_times_s, (
        plan.prediction.decode_time_s)
    if not sizes:
        return None
    beside = "" if not (times_s and one_s) else ", in {} times the time of one".format(
        ", ".join(f"{time_s / one_s:.2f}" for time_s in times_s))
    return "drafts", f"checked by steps over {', '.join(map(str, sizes))} tokens{beside}"


SPECULATION = ScheduleFeature("speculation", candidates=speculating, explain=explain_drafts, finish=try_speculation)
