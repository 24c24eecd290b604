"""One plan for all the prompts of a job, and which of them the budget holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from forebay.commands.prompts import BadLine, Prompt, PromptLine
from forebay.commands.terminal import JobError, doing, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.language_model import LanguageModel
    from forebay.rewriter.ir.plan import Plan
    from forebay.rewriter.planning.options import Options


MIN_COMMON = 64  # tokens that prompts begin with alike, for the rest of them to be looked at
MIN_SAVED = 0.1  # of all tokens of prompts, that need not be computed, for memory to be taken
PREFIX_CACHE = "256MiB"


def common_tokens(prompts: Iterable[Sequence[int]]) -> int:
    """Tokens of prompts that need not be computed, as others begin with them."""
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for ids in map(tuple, prompts):
        groups.setdefault(ids[:MIN_COMMON], []).append(ids)
    return sum((len(group) - 1) * _alike(min(group), max(group))
               for key, group in groups.items() if len(key) == MIN_COMMON)


def _alike(ids: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))


def with_reuse(options: Options, prompts: Sequence[Prompt]) -> Options:
    """Options that keep what the prompts of a job have in common, where that is much and they do not say."""
    saved = common_tokens(prompt.ids for prompt in prompts) if options.prefix_cache is None else 0
    if saved < MIN_SAVED * sum(len(prompt.ids) for prompt in prompts) or not saved or options.mesh is not None:
        return options
    return replace(options, prefix_cache=PREFIX_CACHE)


def fit_job(
    opened: tuple[Any, Any, Any], encoded: list[Prompt], sizes: Any, options: Options, first: int | None = None
) -> tuple[LanguageModel, list[Prompt]]:
    """The model planned once for the whole job, and the prompts that the budget holds.

    Without a wish, the planner says how many prompts are computed at once, unless as many as `first` fit. There is room
    for the longest prompt and for the longest prompt with its answer, but not for both maxima together. Prompts that
    are too long for a `batch` at once, or else even by themselves, are left out, and what all need is said; PlanError
    where not even the shortest fits.
    """
    from forebay.build_model import build_model
    from forebay.rewriter.ir.plan import PlanError, Workload
    from forebay.rewriter.pipeline.plan_search import plan_slots

    if options.plan is not None:
        return build_model(opened, sizes, cast("Plan", options.plan).workload, options), encoded
    batch, new_tokens = options.batch, options.new_tokens or 1
    needs = sorted({_tokens(p, new_tokens) for p in encoded})

    def up_to(most: int) -> list[Prompt]:
        return [p for p in encoded if _tokens(p, new_tokens) <= most]

    def planned(most: int, batch_slots: int | None) -> LanguageModel:
        kept = up_to(most)
        prompts, typical = [len(p.ids) for p in kept], round(fmean(_new_tokens(p, new_tokens) for p in kept))
        beside, how = most - max(prompts), partial(plan_slots, slots=batch_slots)
        known = common_tokens(p.ids for p in kept) if options.keeps_prompts else 0
        computed = max(1, round(fmean(prompts) - known / len(prompts)))

        def made_for(answer: int) -> LanguageModel:
            work = Workload(len(kept), max(prompts), answer, computed, min(typical, answer))
            return build_model(opened, sizes, work, options, how)

        with doing("planning the job"):
            if typical > beside:  # where long prompts have short answers, times of the usual one want more room
                with suppress(PlanError):
                    return made_for(typical)
            return made_for(beside)

    def chosen(most: int) -> LanguageModel:
        if first is not None and batch is None:
            with suppress(PlanError):
                return planned(most, first)
        return planned(most, batch)

    try:
        return chosen(needs[-1]), encoded
    except PlanError as error:
        if len(needs) == 1:
            raise
        planned(needs[0], batch or 1)
        say(f"some prompts are too long for the budget, the others are answered: {error}")
    lm = chosen(_most_that_fit(needs, lambda most: planned(most, batch or 1)))
    w = lm.plan.workload
    return lm, [p for p in encoded if len(p.ids) <= w.prompt and _tokens(p, new_tokens) <= w.context]


def _most_that_fit(needs: list[int], planned: Callable[[int], Any]) -> int:
    """The largest of `needs` that is `planned` without PlanError: the first is, the last is not."""
    from forebay.rewriter.ir.plan import PlanError

    low, high = 0, len(needs) - 1
    while high - low > 1:
        middle = (low + high) // 2
        try:
            planned(needs[middle])
            low = middle
        except PlanError:
            high = middle
    return needs[low]


def _new_tokens(prompt: Prompt, new_tokens: int) -> int:
    return prompt.request.max_new_tokens or new_tokens


def _tokens(prompt: Prompt, new_tokens: int) -> int:
    """Tokens of a prompt and its answer."""
    return len(prompt.ids) + _new_tokens(prompt, new_tokens)


def unfit(left: list[Prompt], fitting: list[Prompt], plan: Plan, new_tokens: int, batch: int | None) -> list[BadLine]:
    """The unanswered prompts that are not among the `fitting`, as lines that are not answered."""
    held, w = {p.request.id for p in fitting}, plan.workload
    most = f"the budget, with --batch {batch}" if batch is not None and batch > 1 else "the budget"
    return [p.request.refused(f"a prompt of {len(p.ids)} tokens and an answer of {_new_tokens(p, new_tokens)} are too "
                              f"long for {most}; the plan has room for {w.context} together, {w.prompt} of a prompt")
            for p in left if p.request.id not in held]


def prompt_room(max_positions: int, saved: Plan | None, new_tokens: int) -> Callable[[PromptLine], int | None]:
    """The longest prompt of a request that fits the model's positions and the saved plan; None for no limit. JobError
    for a request that the job's `new_tokens`, not its own, leave no room."""

    def room(new: int) -> int | None:
        limits = [max_positions - new] if max_positions else []
        if saved is not None:
            limits += [saved.workload.prompt, saved.workload.context - new]
        return min(limits, default=None)

    def most(request: PromptLine) -> int | None:
        found = room(request.max_new_tokens or new_tokens)
        if request.max_new_tokens is None and found is not None and found < 1:
            raise JobError(f"--new-tokens {new_tokens} leaves no room for a prompt: "
                           + (f"the plan has {saved.workload.context} positions" if saved is not None else
                              f"the model has {max_positions} positions"))
        return found

    return most
