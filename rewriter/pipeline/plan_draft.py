"""Choose whether a smaller model drafts for a larger one out of the same budget, by plans made for both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.drafts_beside import beside_s, pays_beside
from forebay.rewriter.ir.plan import Budget, Plan, PlanError
from forebay.rewriter.pipeline.plan_shared_draft import PackedCopy, SharedPlan, plan_shared_draft
from forebay.rewriter.pipeline.plan_speculation import plan_speculation, smallest_checking
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.options import Options

MAX_DRAFTED_TOKENS = 15  # of a step, unless an option says how many: steps over 16, 8, 4 and 2 are planned
MIN_SPEEDUP = 1.05  # times as fast as without a draft: what is predicted to gain less is left


@dataclass(frozen=True)
class DraftedPlan:
    """What was chosen: the model's plan, the pipeline of its Programs, and the plan of the model that drafts, None
    where none does. Both plans' budgets together are within the one that was given; `told` says what was compared.
    Where steps of the model itself draft, in its own memory, `shared` has them, and no other model does. `time_s` are
    the predicted seconds of an answer, and `plain_time_s` those of a token without a draft."""

    pipeline: Pipeline
    plan: Plan
    draft: Plan | None
    told: str
    plain_time_s: float
    time_s: float
    shared: SharedPlan | None = None

    @property
    def drafting(self) -> Plan | None:
        """The plan of what drafts, if anything does."""
        return self.draft if self.shared is None else self.shared.draft


def plan_draft(
    model: tuple[Pipeline, Plan, Options], draft: tuple[Pipeline, Options], budget: Budget, chance: float
) -> DraftedPlan:
    """Split `budget` between `model`, with its plan without a draft, and the model of `draft`, where an answer is
    predicted to take less time so; a drafted token is taken to stand with `chance` where all before it do. As texts
    differ, and what the draft has of the budget slows every step, it must pay with the square of that chance too. With
    a number of drafted tokens in the model's options a split is taken whatever it costs; PlanError where there is none.
    """
    (pipeline, plain, options), (drafter, asked) = model, draft
    forced, plain_token_s = isinstance(options.prompt_lookup_num_tokens, int), plain.prediction.decode_time_s
    checked, part = replace(options, prompt_lookup_num_tokens=_tokens(options)), Budget(0)
    plain_s = _answer_s(plain, plain_token_s)
    try:
        part = _size_of_draft(drafter, budget, asked)
        rest = Budget(budget.device - part.device, _without(budget.host, part.host), budget.disk)
        if rest.device <= 0:
            raise PlanError("it leaves the model nothing; give a smaller draft")
        drafting = drafter.plan(part, asked)
        checking, plan = plan_speculation(pipeline, plain, rest, checked)
    except PlanError as error:
        why = _lacking(part, (pipeline, checked), budget) or str(error)
        if forced:
            raise PlanError(f"draft: {why}") from error
        return DraftedPlan(pipeline, plain, None, f"none: {why}", plain_token_s, plain_s)
    token_s = token_time_s(plan, drafting, chance)
    told = _told(plain, plan, drafting, chance, drafting.budget.device, token_s)
    if forced or drafted_time_s(plan, drafting, chance**2) * MIN_SPEEDUP <= plain_s:
        return DraftedPlan(checking, plan, drafting, told, plain_token_s, drafted_time_s(plan, drafting, chance))
    where = f" on texts where {100 * chance**2:.0f} % are right" if (
        drafted_time_s(plan, drafting, chance) * MIN_SPEEDUP <= plain_s) else ""
    return DraftedPlan(pipeline, plain, None, f"none, for it would not pay{where}: {told}", plain_token_s, plain_s)


def plan_own_draft(
    model: tuple[Pipeline, Plan, Options], copy: PackedCopy, budget: Budget, chance_of: Callable[[float], float]
) -> DraftedPlan:
    """As `plan_draft`, with steps of the model itself that draft in its own memory by weights of `copy`; `chance_of`
    gives the chance of their tokens by the share of weights that are packed."""
    pipeline, plain, options = model
    forced, plain_token_s = isinstance(options.prompt_lookup_num_tokens, int), plain.prediction.decode_time_s
    plain_s = _answer_s(plain, plain_token_s)
    try:
        found = plan_shared_draft(pipeline, plain, options, copy, budget, _tokens(options))
    except PlanError as error:
        if forced:
            raise PlanError(f"draft: {error}") from error
        return DraftedPlan(pipeline, plain, None, f"none: {error}", plain_token_s, plain_s)
    chance = chance_of(found.packed)
    token_s = token_time_s(found.plan, found.draft, chance, False)
    told = "steps of its own, which share its cache and what is resident: " + _told(
        plain, found.plan, found.draft, chance, budget.device - found.plan.budget.device, token_s)
    sure_s = _answer_s(found.plan, token_time_s(found.plan, found.draft, chance**2, False))
    if not forced and sure_s * MIN_SPEEDUP > plain_s:
        return DraftedPlan(pipeline, plain, None, f"none, for it would not pay: {told}", plain_token_s, plain_s)
    return DraftedPlan(found.pipeline, found.plan, None, told, plain_token_s, _answer_s(found.plan, token_s), found)


def _tokens(options: Options) -> int:
    """Drafted tokens that a step checks at most."""
    return options.prompt_lookup_num_tokens if isinstance(options.prompt_lookup_num_tokens, int) else MAX_DRAFTED_TOKENS


def drafted_time_s(plan: Plan, draft: Plan, chance: float) -> float:
    """Predicted seconds of an answer whose drafts are those of `draft`, prompt and all."""
    return draft.prediction.prefill_time_s + _answer_s(plan, token_time_s(plan, draft, chance))


def token_time_s(plan: Plan, draft: Plan, chance: float, ahead: bool = True) -> float:
    """Predicted seconds per token of each sequence with the best of the plan's steps: a step over K tokens gives
    (1 - chance^K) / (1 - chance) of them behind K - 1 steps of the draft, and one more where all stood, whose last
    token the draft's cache then lacks (Leviathan et al. 2023, equation 1 and theorem 3.8). Where that pays the draft's
    steps run beside it (`ahead`: they may), for nothing unless all stand and the token behind them is guessed."""
    each_s, s = draft.prediction.decode_time_s, plan.schedule
    busy_s = dict(zip(s.speculative_steps, plan.prediction.speculative_busy_s, strict=False))

    def pass_s(size: int, time_s: float) -> float:
        behind_s = (size - 1 + (chance ** (size - 1) if size > 1 else 0)) * each_s
        times = time_s, busy_s.get(size, time_s), size * each_s
        if ahead and size in busy_s and not draft.prediction.streamed_nbytes and pays_beside(*times, chance**size):
            return beside_s(*times) + (1 - chance**size) * behind_s
        return time_s + behind_s

    return min(pass_s(size, time_s) / sum(chance**i for i in range(size)) for size, time_s in _times_s(plan).items())


def _times_s(plan: Plan) -> Mapping[int, float]:
    said = plan.prediction
    return dict(zip((1, *plan.schedule.speculative_steps), (said.decode_time_s, *said.speculative_times_s),
                    strict=True))


def _answer_s(plan: Plan, token_s: float) -> float:
    return plan.prediction.prefill_time_s + max(0, plan.workload.paced(plan.schedule.batching)[1] - 1) * token_s


def _size_of_draft(draft: Pipeline, budget: Budget, options: Options) -> Budget:
    """The part of the budget with which all of the draft's weights are resident. With half of them SmolLM2 at 15 % of
    its bytes lost 22 % to plain steps on plain text where a gain was predicted: both models' reads share the disk."""
    whole = draft.plan(Budget(1 << 50, budget.host, budget.disk), options).prediction.peak_nbytes
    return Budget(whole["device"], None if budget.host is None else whole.get("host", 0), budget.disk)


def _lacking(part: Budget, model: tuple[Pipeline, Options], budget: Budget) -> str:
    """What a device budget is short of beside the `part` of a draft; "" where it is not that."""
    try:
        least = smallest_checking(*model)
    except PlanError:
        return ""
    if part.device + least <= budget.device:
        return ""
    return (f"a device budget of {format_nbytes(budget.device)} cannot work for both; the smallest that can is "
            f"{format_nbytes(part.device + least)} ({part.device + least} bytes: {format_nbytes(part.device)} of the "
            f"draft's weights, cache and activations, {format_nbytes(least)} of the model's). A smaller draft needs "
            "less")


def _without(host: int | None, taken: int | None) -> int | None:
    return None if host is None else max(0, host - (taken or 0))


def _told(plain: Plan, plan: Plan, draft: Plan, chance: float, nbytes: int, with_s: float) -> str:
    """What both take, the draft `nbytes` of the budget, and what is expected of it, `with_s` for a token of each
    sequence, in a line or two."""
    p, d, without_s = plan.prediction, draft.prediction, plain.prediction.decode_time_s
    streams = f", of which {format_nbytes(d.streamed_nbytes)} stream for each token" if d.streamed_nbytes else ""
    return (f"{format_nbytes(nbytes)} of the device budget{streams}, {1000 * d.decode_time_s:.3g} ms a "
            f"drafted token; the model's step takes {1000 * p.decode_time_s:.3g} ms in the "
            f"{format_nbytes(plan.budget.device)} left, for {1000 * without_s:.3g} ms in all of it; with "
            f"{100 * chance:.0f} % of drafted tokens right {_rate(with_s)} tokens/s per sequence, without a draft "
            f"{_rate(without_s)}")


def _rate(time_s: float) -> str:
    return f"{1 / time_s:.3g}" if time_s > 0 else "no"
