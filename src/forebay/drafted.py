"""A language model beside which a smaller one drafts, both in one budget."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from typing import Any

from forebay.drafts_seen import KNOWN, DraftsSeen
from forebay.huggingface.same_tokenizer import refuse_other_tokenizer
from forebay.language_model import LOG, LanguageModel
from forebay.open_model import open_model
from forebay.rewriter.capture.step_graphs import step_graphs
from forebay.rewriter.checkpoints.resolve import draft_copies, draft_format, resolve_draft
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Workload
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.ir.shared_draft import COPY_STANDS, SharedDraft
from forebay.rewriter.pipeline.plan_block import PlanChoice, plan_block
from forebay.rewriter.pipeline.plan_draft import DraftedPlan, plan_draft, plan_own_draft, token_time_s
from forebay.rewriter.pipeline.plan_shared_draft import PackedCopy
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.check_plan import require_within
from forebay.rewriter.planning.options import Options
from forebay.rewriter.report.explain_shared import explain_shared
from forebay.runtime.run.session import Session, resident_copies

ASSUMED = 0.6  # of a smaller model's tokens stand, until some were checked; Leviathan et al. 2023, table 3: 0.5 to 0.9
BOTH = "; by steps of the model itself, "  # between why neither is taken
FEWER = 0.02  # by this the share must have fallen since a plan for another to be made
NO_LIMIT = 1 << 50  # bytes


class DraftedModel(LanguageModel):
    """A model and one that may draft for it. Where that is predicted to pay, `helper` has a part of the budget, under a
    plan of its own that is proved as any; `split` says what was compared. Drafts so far say how many stand."""

    def __init__(
        self, draft: str | os.PathLike[str], captured: Any, checkpoint: Any, files: Any, budget: Budget,
        workload: Workload, options: Options, machine: Any = None, plan: Plan | None = None,
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
        self._copied = draft_format(draft) is not None
        whole = replace(budget, device=NO_LIMIT)  # until its part is known; no memory is taken before
        self._helper = LanguageModel(*opened, whole, Workload(1, 1, 1), _draft_options(options), machine)
        self._seen = DraftsSeen(checkpoint.fingerprint, opened[1].fingerprint, _assumed(draft))
        self._helper.drafts_seen = self._seen
        super().__init__(captured, checkpoint, files, budget, workload, options, machine, choose=choose)

    @property
    def helper(self) -> LanguageModel | None:  # type: ignore[override]
        """The model that drafts; None where none is predicted to pay, and where steps of this one draft."""
        return self._helper if self.split is not None and self.split.draft is not None else None

    @property
    def shared_draft(self) -> SharedDraft | None:  # type: ignore[override]
        """The step of this model that drafts in its memory, with the copies that fill what is its own."""
        if self.split is None or (shared := self.split.shared) is None:
            return None
        own = replace(shared.draft, weights=tuple(w for w in shared.draft.weights if w.name in shared.own))
        return SharedDraft(shared.draft, shared.program, tuple(resident_copies(own, self._files_of(shared.own))),
                           self.seen)

    @property
    def session(self) -> Session:
        """The running session; that of the model that drafts is made with it."""
        if self.helper is not None:
            _ = self.helper.session
        return super().session

    @property
    def seen(self) -> DraftsSeen:
        """How many tokens of what drafts stood."""
        shared = None if self.split is None else self.split.shared
        return self._seen if shared is None else self._seen_with(shared.packed)

    @property
    def chance(self) -> float:
        """The share of drafted tokens that is expected to stand where all before them do."""
        return self.seen.chance

    def _reserve(self, batch: int, prompt: int, new_tokens: int, in_places: bool) -> None:
        """As of every model; and where a draft was taken whose tokens stand so seldom that the whole budget without it
        is predicted to do better, plan without it."""
        split = self.split
        if split is not None and split.drafting is not None and self.seen.known >= KNOWN and not (
                isinstance(self.options.prompt_lookup_num_tokens, int)):
            with_s = token_time_s(split.plan, split.drafting, self.chance, split.shared is None)
            if with_s > split.plain_time_s > 0 and self.chance < self._expected - FEWER:
                LOG.info("of drafted tokens %.0f %% stood, which is too few: planning without a draft",
                         100 * self.chance)
                self._prepare(self.plan.workload, self.options, plan_block)
        super()._reserve(batch, prompt, new_tokens, in_places)

    def explain(self) -> str:
        """The plan as text, what drafts and why, and the plan of what drafts."""
        assert self.split is not None
        draft = [f"The plan of the draft:\n\n{self._helper.explain()}"] if self.helper else []
        if (shared := self.split.shared) is not None:
            draft = [explain_shared(shared.draft, self.plan)]
        return "\n\n".join([super().explain(), f"draft       {self.split.told}; {self.seen}", *draft])

    def _plan_anew(self, workload: Workload, options: Options, choose: PlanChoice) -> tuple[Pipeline, Plan]:
        pipeline, plain = self._plan_alone(workload, options, choose)
        helper, asked = self._helper, _draft_options(options, plain.schedule.batching.admitted)
        limit = helper.captured.max_positions or NO_LIMIT
        prompt = min(plain.workload.prompt + 1, limit - 1)  # the answer's first token is known when drafts begin
        work = plain.workload.of(plain.workload.batch, prompt, min(plain.workload.new_tokens, limit - prompt))
        draft = Pipeline(helper._graphs(work, asked.batching(work.batch)), work, self.machine, self.switches)
        found = self._best((pipeline, plain, options), (draft, asked))
        self.split = found
        self._expected = self.chance
        if found.shared is not None:
            require_within(found.shared.draft, self.budget)
        if found.draft is not None:
            part = found.draft.budget
            require_within(found.plan, replace(self.budget, device=self.budget.device - part.device))
            helper._adopt(draft, found.draft)
            helper.budget = replace(self.budget, device=part.device, host=part.host)
        return found.pipeline, found.plan

    def _plan_alone(self, workload: Workload, options: Options, choose: PlanChoice) -> tuple[Pipeline, Plan]:
        """The model's plan as if nothing drafted. Where drafts are forced and the budget is too small for that already,
        it is as if there were no budget: what both need is then named, not what one needs."""
        try:
            return super()._plan_anew(workload, options, choose)
        except PlanError:
            if not isinstance(options.prompt_lookup_num_tokens, int):
                raise
        given = self.budget
        self.budget = replace(given, device=NO_LIMIT)
        try:
            return super()._plan_anew(workload, options, choose)
        finally:
            self.budget = given

    def _best(self, model: tuple[Pipeline, Plan, Options], draft: tuple[Pipeline, Options]) -> DraftedPlan:
        """By a copy of the model, in memory of its own or in the model's, whichever is predicted to answer sooner; any
        other draft has its own. PlanError where drafts are forced and there is room for neither."""
        found, refused = [], []
        for way in (self._apart, self._beside)[: 1 + self._copied]:
            try:
                found.append(way(model, draft))
            except PlanError as error:
                refused.append(error)
        if not found:
            raise PlanError(BOTH.join(str(error) for error in refused).replace(BOTH + "draft: ", BOTH))
        best = min(found, key=lambda split: (split.drafting is None, split.time_s))
        if best.drafting is None and len(found) == 2:
            best = replace(best, told=BOTH.join(split.told for split in found))
        return best

    def _apart(self, model: tuple[Pipeline, Plan, Options], draft: tuple[Pipeline, Options]) -> DraftedPlan:
        return plan_draft(model, draft, self.budget, self._seen.chance)

    def _beside(self, model: tuple[Pipeline, Plan, Options], draft: tuple[Pipeline, Options]) -> DraftedPlan:
        return plan_own_draft(model, self._copy(model[1]), self.budget, lambda packed: self._seen_with(packed).chance)

    def _seen_with(self, packed: float) -> DraftsSeen:
        """How many tokens stood of those that steps of the model gave with about such a share of its weights packed;
        they are assumed to be refused as seldom as that is small."""
        name = f"{self._helper.checkpoint.fingerprint} sharing {round(10 * packed)}"
        return DraftsSeen(self.checkpoint.fingerprint, name, 1 - packed * (1 - self._seen.assumed))

    @cached_property
    def _packed(self) -> dict[str, int]:
        """Bytes of the weights that the copy has in fewer than the model."""
        weights = self._helper.captured.weights
        return {name: file.nbytes for name, file in self._helper.files.items()
                if weights[name].stored is not None and file.nbytes < self.files[name].nbytes}

    def _copy(self, plan: Plan) -> PackedCopy:
        """The weights of the copy, for steps of this model as long as those of `plan`."""
        def pipeline(own: Collection[str]) -> Pipeline:
            packed = {name: self._helper.captured.weights[name] if name in own and name in self._packed else spec
                      for name, spec in self.captured.weights.items()}
            captured = rewrite_captured(replace(self.captured, weights=packed), self.switches, plan.cache_format)
            name = f"{self.checkpoint.fingerprint} drafting"
            graphs = step_graphs(captured, self._files_of(own), plan.workload, name,
                                 host_hop=self.machine.kind.host_hop)
            return Pipeline(replace(graphs, prefill=None), plan.workload, self.machine, self.switches)

        return PackedCopy(self._packed, pipeline)

    def _files_of(self, own: Collection[str]) -> dict[str, FileSlice]:
        """Where the weights of a step that drafts lie, of which those `own` are the copy's where it has them packed."""
        return {name: self._helper.files[name] if name in own and name in self._packed else file
                for name, file in self.files.items()}

    def check_files(self) -> None:
        super().check_files()
        if self.split is not None and self.split.shared is not None:
            self._helper.check_files()

    def _end_session(self) -> None:
        super()._end_session()
        self._helper._end_session()


def best_drafted(captured: Any, checkpoint: Any, files: Any, budget: Budget, *more: Any) -> DraftedModel:
    """The model beside the copy of itself, of those that `draft_copies` tells, that drafts by the planner's choice; the
    last where none does, which says why."""
    *better, last = draft_copies(checkpoint.folder, budget.device)
    for name in better:
        lm = DraftedModel(name, captured, checkpoint, files, budget, *more)
        if lm.split is not None and lm.split.drafting is not None:
            return lm
    return DraftedModel(last, captured, checkpoint, files, budget, *more)


def draft_summary(lm: LanguageModel) -> str:
    """What drafts for a model, and why."""
    return f"{lm.split.told}; {lm.seen}" if isinstance(lm, DraftedModel) and lm.split is not None else "none was given"


def _assumed(draft: str | os.PathLike[str]) -> float:
    """The share of tokens that is taken to stand before any was checked."""
    format = draft_format(draft)
    return ASSUMED if format is None else COPY_STANDS[format.bits]


def _draft_options(options: Options, entering: int = 0) -> Options:
    """Its cache stays on the device, for what comes from elsewhere would come for each drafted token; sequences enter
    its places as they do the model's, so many at once."""
    return Options(cache=options.cache, cache_tier="device", entering=entering or None)
