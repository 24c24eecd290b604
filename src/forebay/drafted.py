"""A language model beside which a smaller one drafts, both in one budget."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from forebay.api import LOG, LanguageModel
from forebay.drafts_seen import KNOWN, DraftsSeen
from forebay.huggingface.same_tokenizer import refuse_other_tokenizer
from forebay.open_model import open_model
from forebay.rewriter.checkpoints.resolve import draft_copies, draft_format, resolve_draft
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Workload
from forebay.rewriter.pipeline import Pipeline
from forebay.rewriter.plan_block import PlanChoice, plan_block
from forebay.rewriter.plan_draft import DraftedPlan, plan_draft, token_time_s
from forebay.rewriter.planning.check_plan import require_within
from forebay.rewriter.planning.wishes import Wishes
from forebay.runtime.run.session import Session

ASSUMED = 0.6  # of a smaller model's tokens stand, until some were checked; Leviathan et al. 2023, table 3: 0.5 to 0.9
COPIES = {4: 0.75, 8: 0.95}  # of a copy's by its bits: SmolLM2's, greedy, ten texts: 0.79 (0.68 to 0.96), 0.98
FEWER = 0.02  # by this the share must have fallen since a plan for another to be made
NO_LIMIT = 1 << 50  # bytes


class DraftedModel(LanguageModel):
    """A model and one that may draft for it. Where that is predicted to pay, `helper` has a part of the budget, under a
    plan of its own that is proved as any; `split` says what was compared. Drafts so far say how many stand."""

    def __init__(
        self, draft: str | os.PathLike[str], captured: Any, checkpoint: Any, files: Any, budget: Budget,
        workload: Workload, wishes: Wishes, machine: Any = None, plan: Plan | None = None,
        choose: PlanChoice = plan_block,
    ) -> None:
        if plan is not None:
            raise PlanError("draft: a plan that is replayed was made without one; leave one of both out, or wrap the "
                            "draft by itself and give it to generate as assistant_model")
        opened = open_model(resolve_draft(draft, checkpoint.folder))
        if opened[0].vocab_size != captured.vocab_size:
            raise PlanError(f"draft: it has {opened[0].vocab_size} tokens in its vocabulary, the model "
                            f"{captured.vocab_size}; give a model of the same tokenizer")
        try:
            refuse_other_tokenizer(checkpoint.folder, opened[1].folder, "draft")
        except ValueError as error:
            raise PlanError(str(error)) from error
        self.split: DraftedPlan | None = None
        whole = replace(budget, device=NO_LIMIT)  # until its part is known; no memory is taken before
        self._helper = LanguageModel(*opened, whole, Workload(1, 1, 1), _draft_wishes(wishes), machine)
        self._seen = DraftsSeen(checkpoint.fingerprint, opened[1].fingerprint, _assumed(draft))
        self._helper.drafts_seen = self._seen
        super().__init__(captured, checkpoint, files, budget, workload, wishes, machine, choose=choose)

    @property
    def helper(self) -> LanguageModel | None:  # type: ignore[override]
        """The model that drafts; None where none is predicted to pay."""
        return self._helper if self.split is not None and self.split.draft is not None else None

    @property
    def session(self) -> Session:
        """The running session; that of the model that drafts is made with it."""
        if self.helper is not None:
            _ = self.helper.session
        return super().session

    @property
    def chance(self) -> float:
        """The share of drafted tokens that is expected to stand where all before them do."""
        return self._seen.chance

    def reserve(self, batch: int, prompt: int, new_tokens: int, in_places: bool = False) -> None:
        """As of every model; and where a draft was taken whose tokens stand so seldom that the whole budget without it
        is predicted to do better, plan without it."""
        split = self.split
        if split is not None and split.draft is not None and self._seen.known >= KNOWN and not (
                isinstance(self.wishes.drafted_tokens, int)):
            with_s = token_time_s(split.plan, split.draft, self.chance)
            if with_s > split.plain_time_s > 0 and self.chance < self._expected - FEWER:
                LOG.info("of drafted tokens %.0f %% stood, which is too few: planning without a draft",
                         100 * self.chance)
                self._prepare(self.plan.workload, self.wishes, plan_block)
        super().reserve(batch, prompt, new_tokens, in_places)

    def explain(self) -> str:
        """The plan as text, what drafts and why, and the plan of what drafts."""
        assert self.split is not None
        return "\n\n".join([super().explain(), f"draft       {self.split.told}; {self._seen}", *(
            [f"The plan of the draft:\n\n{self._helper.explain()}"] if self.helper else [])])

    def _plan_anew(self, workload: Workload, wishes: Wishes, choose: PlanChoice) -> tuple[Pipeline, Plan]:
        pipeline, plain = super()._plan_anew(workload, wishes, choose)
        helper, asked = self._helper, _draft_wishes(wishes, plain.schedule.block.entering)
        limit = helper.captured.max_positions or NO_LIMIT
        prompt = min(plain.workload.prompt + 1, limit - 1)  # the answer's first token is known when drafts begin
        work = plain.workload.of(plain.workload.batch, prompt, min(plain.workload.new_tokens, limit - prompt))
        draft = Pipeline(helper._graphs(work, asked.block(work.batch)), work, self.machine, self.switches)
        self._expected = self.chance
        self.split = found = plan_draft((pipeline, plain, wishes), (draft, asked), self.budget, self.chance)
        if found.draft is not None:
            part = found.draft.budget
            require_within(found.plan, replace(self.budget, device=self.budget.device - part.device))
            helper._adopt(draft, found.draft)
            helper.budget = replace(self.budget, device=part.device, host=part.host)
        return found.pipeline, found.plan

    def _end_session(self) -> None:
        super()._end_session()
        self._helper._end_session()


def best_drafted(captured: Any, checkpoint: Any, files: Any, budget: Budget, *more: Any) -> DraftedModel:
    """The model beside the copy of itself, of those that `draft_copies` tells, that drafts by the planner's choice; the
    last where none does, which says why."""
    *better, last = draft_copies(checkpoint.folder, budget.device)
    for name in better:
        lm = DraftedModel(name, captured, checkpoint, files, budget, *more)
        if lm.helper is not None:
            return lm
    return DraftedModel(last, captured, checkpoint, files, budget, *more)


def told(lm: LanguageModel) -> str:
    """What drafts for a model, and why."""
    return f"{lm.split.told}; {lm._seen}" if isinstance(lm, DraftedModel) and lm.split is not None else "none was given"


def _assumed(draft: str | os.PathLike[str]) -> float:
    """The share of tokens that is taken to stand before any was checked."""
    format = draft_format(draft)
    return ASSUMED if format is None else COPIES[format.bits]


def _draft_wishes(wishes: Wishes, entering: int = 0) -> Wishes:
    """Its cache stays on the device, for what comes from elsewhere would come for each drafted token; sequences enter
    its places as they do the model's, so many at once."""
    return Wishes(cache_format=wishes.cache_format, cache_tier="device", entering=entering or None)
