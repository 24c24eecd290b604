"""Choose whether a smaller model drafts for a larger one out of the same budget, by plans made for both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.drafts_beside import beside_s, pays_beside
from forebay.rewriter.ir.durations import format_seconds
from forebay.rewriter.ir.plan import Budget, Plan, PlanError
from forebay.rewriter.pipeline.plan_shared_draft import PackedCopy, SharedPlan, checking_drafts, plan_shared_draft
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.options import Options

MAX_DRAFTED_TOKENS = 15  # of a step, unless an option says how many: steps over 16, 8, 4 and 2 are planned
BOTH = "; by steps of the model itself, "  # between why neither is taken
MIN_SPEEDUP = 1.05  # times as fast as without a draft: what is predicted to gain less is left


@dataclass(frozen=True)
class DraftedPlan:
    """The chosen plans of a model and its draft: the model's plan, the pipeline of its Programs, and the plan of the
    model that drafts, None where none does. Both plans' budgets together are within the one that was given; `told` says
    what was compared. Where steps of the model itself draft, in its own memory, `shared` has them, and no other model
    does. `time_s` are the predicted seconds of an answer, and `plain_time_s` those of a token without a draft."""

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


@dataclass(frozen=True)
class DraftWay:
    """A way to draft: the model's plan, whose steps check drafts, with the pipeline of its Programs, the plan of what
    drafts, which takes `nbytes` of the device budget, and the chance that a token of it stands where all before do."""

    pipeline: Pipeline
    plan: Plan
    draft: Plan
    chance: float
    nbytes: int
    shared: SharedPlan | None = None  # steps of the model itself draft, in its own memory

    def answer_s(self, chance: float) -> float:
        """Predicted seconds of an answer, prompt and all."""
        prefill_s = self.draft.prediction.prefill_time_s if self.shared is None else 0.0
        return prefill_s + answer_time_s(self.plan, token_time_s(self.plan, self.draft, chance, self.shared is None))


def plan_draft(
    model: tuple[Pipeline, Plan, Options], ways: Sequence[Callable[[], DraftWay]]
) -> DraftedPlan:
    """Choose the way to draft for a model, given its plan without a draft: the one with the least predicted time of an
    answer, where it takes less than without. As texts differ, and what the draft has of the budget slows every step, it
    must pay with the square of the expected chance too. With a number of drafted tokens in the model's options one is
    taken whatever it costs; PlanError where there is none."""
    pipeline, plain, options = model
    forced, plain_token_s = isinstance(options.prompt_lookup_num_tokens, int), plain.prediction.decode_time_s
    plain_s = answer_time_s(plain, plain_token_s)
    taken, left, refused = list[DraftedPlan](), list[str](), list[str]()
    for make in ways:
        try:
            way = make()
        except PlanError as error:
            refused.append(str(error))
            left.append(f"none: {error}")
            continue
        told, time_s = _told(plain, way), way.answer_s(way.chance)
        if forced or way.answer_s(way.chance**2) * MIN_SPEEDUP <= plain_s:
            taken.append(DraftedPlan(way.pipeline, way.plan, way.draft if way.shared is None else None, told,
                                     plain_token_s, time_s, way.shared))
            continue
        where = f" on texts where {100 * way.chance**2:.0f} % are right" if time_s * MIN_SPEEDUP <= plain_s else ""
        left.append(f"none, for it would not pay{where}: {told}")
    if forced and not taken:
        raise PlanError(f"draft: {BOTH.join(refused)}")
    return min(taken, key=lambda split: split.time_s, default=DraftedPlan(
        pipeline, plain, None, BOTH.join(left), plain_token_s, plain_s))


def draft_apart(
    model: tuple[Pipeline, Plan, Options], draft: tuple[Pipeline, Options], budget: Budget, chance: float
) -> DraftWay:
    """Split `budget` between the model and another that drafts. PlanError where it cannot be split."""
    (pipeline, _, options), (drafter, asked) = model, draft
    checked, part = replace(options, prompt_lookup_num_tokens=drafted_tokens(options)), Budget(0)
    try:
        part = _size_of_draft(drafter, budget, asked)
        rest = Budget(budget.device - part.device, _without(budget.host, part.host), budget.disk)
        if rest.device <= 0:
            raise PlanError("it leaves the model nothing; give a smaller draft")
        drafting = drafter.plan(part, asked)
        checking = checking_drafts(pipeline, checked)
        return DraftWay(checking, checking.plan(rest, checked), drafting, chance, drafting.budget.device)
    except PlanError as error:
        raise PlanError(_lacking(part, (pipeline, checked), budget) or str(error)) from error


def draft_beside(
    model: tuple[Pipeline, Plan, Options], copy: PackedCopy, budget: Budget, chance_of: Callable[[float], float]
) -> DraftWay:
    """Let steps of the model itself draft in its own memory by weights of `copy`; `chance_of` gives the chance of their
    tokens by the share of weights that are packed. PlanError where there is no room for them."""
    shared = plan_shared_draft(*model, copy, budget, drafted_tokens(model[2]))
    return DraftWay(shared.pipeline, shared.plan, shared.draft, chance_of(shared.packed),
                    budget.device - shared.plan.budget.device, shared)


def drafted_tokens(options: Options) -> int:
    """Drafted tokens that a step checks at most."""
    return options.prompt_lookup_num_tokens if isinstance(options.prompt_lookup_num_tokens, int) else MAX_DRAFTED_TOKENS


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


def answer_time_s(plan: Plan, token_s: float) -> float:
    """Predicted seconds of an answer whose tokens take so long each, prompt and all."""
    new_tokens = plan.workload.effective_lengths(plan.schedule.batching)[1]
    return plan.prediction.prefill_time_s + max(0, new_tokens - 1) * token_s


def _size_of_draft(draft: Pipeline, budget: Budget, options: Options) -> Budget:
    """The part of the budget with which all of the draft's weights are resident. With half of them SmolLM2 at 15 % of
    its bytes lost 22 % to plain steps on plain text where a gain was predicted: both models' reads share the disk."""
    whole = draft.plan(Budget(1 << 50, budget.host, budget.disk), options).prediction.peak_nbytes
    return Budget(whole["device"], None if budget.host is None else whole.get("host", 0), budget.disk)


def _lacking(part: Budget, model: tuple[Pipeline, Options], budget: Budget) -> str:
    """Return the shortage of a device budget next to the `part` of a draft, as text; "" for other errors."""
    try:
        least = checking_drafts(*model).smallest_budget(model[1])
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


def _told(plain: Plan, way: DraftWay) -> str:
    """Describe both models' memory and the expected gain of the draft, in a line or two."""
    p, d, without_s = way.plan.prediction, way.draft.prediction, plain.prediction.decode_time_s
    whose = "" if way.shared is None else "steps of its own, which share its cache and what is resident: "
    streams = f", of which {format_nbytes(d.streamed_nbytes)} stream for each token" if d.streamed_nbytes else ""
    with_s = token_time_s(way.plan, way.draft, way.chance, way.shared is None)
    return (f"{whose}{format_nbytes(way.nbytes)} of the device budget{streams}, {format_seconds(d.decode_time_s)} a "
            f"drafted token; the model's step takes {format_seconds(p.decode_time_s)} in the "
            f"{format_nbytes(way.plan.budget.device)} left, for {format_seconds(without_s)} in all of it; with "
            f"{100 * way.chance:.0f} % of drafted tokens right {_rate(with_s)} tokens/s per sequence, without a draft "
            f"{_rate(without_s)}")


def _rate(time_s: float) -> str:
    return f"{1 / time_s:.3g}" if time_s > 0 else "no"
