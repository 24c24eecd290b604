"""A language model beside which a smaller one drafts, both in one budget."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from forebay.api import LanguageModel
from forebay.huggingface.same_tokenizer import refuse_other_tokenizer
from forebay.open_model import open_model
from forebay.rewriter.checkpoints.resolve import resolve_draft
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Workload
from forebay.rewriter.pipeline import Pipeline
from forebay.rewriter.plan_block import PlanChoice
from forebay.rewriter.plan_draft import DraftedPlan, plan_draft
from forebay.rewriter.planning.check_plan import require_within
from forebay.rewriter.planning.wishes import Wishes
from forebay.runtime.run.session import Session
from forebay.runtime.run.speculation import Tally

ASSUMED = 0.7  # of drafted tokens stand, until some were checked; Leviathan et al. 2023, table 3, has 0.5 to 0.9
KNOWN = 64  # drafted tokens that are checked before what they say is believed
NO_LIMIT = 1 << 50  # bytes


class DraftedModel(LanguageModel):
    """A model and one that may draft for it. Where that is predicted to pay, `helper` has a part of the budget, under a
    plan of its own that is proved as any; `split` says what was compared. Drafts so far say how many stand."""

    def __init__(
        self, draft: str | os.PathLike[str], captured: Any, checkpoint: Any, files: Any, budget: Budget,
        workload: Workload, wishes: Wishes, machine: Any = None, plan: Plan | None = None,
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
        self._tally = Tally()
        self._right = self._wrong = 0  # drafted tokens of earlier answers that stood, and that did not
        whole = replace(budget, device=NO_LIMIT)  # until its part is known; no memory is taken before
        self._helper = LanguageModel(*opened, whole, Workload(1, 1, 1), _draft_wishes(wishes), machine)
        super().__init__(captured, checkpoint, files, budget, workload, wishes, machine)

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
    def tally(self) -> Tally:  # type: ignore[override]
        """What drafts brought in the last `generate`."""
        return self._tally

    @tally.setter
    def tally(self, tally: Tally) -> None:
        if self.helper is not None:
            self._right, self._wrong = self._right + self._tally.accepted, self._wrong + self._tally.refused
        self._tally = tally

    @property
    def chance(self) -> float:
        """The share of drafted tokens that stand where all before them do: as it was so far, else as is assumed."""
        known = self._right + self._wrong
        return self._right / known if known >= KNOWN else ASSUMED

    def explain(self) -> str:
        """The plan as text, what drafts and why, and the plan of what drafts."""
        assert self.split is not None
        return "\n\n".join([super().explain(), f"draft       {self.split.told}", *(
            [f"The plan of the draft:\n\n{self._helper.explain()}"] if self.helper else [])])

    def _plan_anew(self, workload: Workload, wishes: Wishes, choose: PlanChoice) -> tuple[Pipeline, Plan]:
        pipeline, plain = super()._plan_anew(workload, wishes, choose)
        helper, asked = self._helper, _draft_wishes(wishes)
        limit = helper.captured.max_positions or NO_LIMIT
        prompt = min(plain.workload.prompt + 1, limit - 1)  # the answer's first token is known when drafts begin
        work = Workload(plain.workload.batch, prompt, min(plain.workload.new_tokens, limit - prompt))
        draft = Pipeline(helper._graphs(work, asked.block(work.batch)), work, self.machine, self.switches)
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


def told(lm: LanguageModel) -> str:
    """What drafts for a model, and why."""
    return lm.split.told if isinstance(lm, DraftedModel) and lm.split is not None else "none was given"


def _draft_wishes(wishes: Wishes) -> Wishes:
    """Tokens that were refused are taken back from a cache on the device alone."""
    return Wishes(cache_format=wishes.cache_format, cache_tier="device")
