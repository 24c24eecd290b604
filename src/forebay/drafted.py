"""A language model beside which a smaller one drafts, both in one budget."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property, partial

from forebay.drafts_seen import DraftsSeen
from forebay.huggingface.same_tokenizer import refuse_other_tokenizer
from forebay.language_model import LanguageModel
from forebay.model_planner import ModelPlanner, PlannedDrafts, PlannedSteps
from forebay.open_model import open_model
from forebay.rewriter.checkpoints.checkpoint import Checkpoint
from forebay.rewriter.checkpoints.resolve import draft_format, resolve_draft
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Workload
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.ir.schedule.batch_schedule import ALONE
from forebay.rewriter.ir.shared_draft import COPY_STANDS, SharedDraft
from forebay.rewriter.ir.state import require_states
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.plan_draft import DraftedPlan, draft_apart, draft_beside, plan_draft
from forebay.rewriter.pipeline.plan_shared_draft import PackedCopy, SharedPlan
from forebay.rewriter.pipeline.plan_task import ModelGraphs, PlanChoice
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.check_plan import require_within
from forebay.rewriter.planning.options import Options
from forebay.runtime.run.session import resident_copies

ASSUMED = 0.6  # of a smaller model's tokens stand, until some were checked; Leviathan et al. 2023, table 3: 0.5 to 0.9
NO_LIMIT = 1 << 50  # bytes


class DraftedPlanner:
    """Plans a model and one that may draft for it, each with steps that are proved as any. Where that is predicted to
    pay, the draft has a part of the budget, or a copy of the model drafts in the model's own memory. Drafts so far say
    how many are accepted."""

    def __init__(self, draft: str | os.PathLike[str], captured: CapturedModel, checkpoint: Checkpoint,
                 files: dict[str, FileSlice], budget: Budget, machine: Machine) -> None:
        opened = open_model(resolve_draft(draft, checkpoint.folder))
        if opened[0].vocab_size != captured.vocab_size:
            raise PlanError(f"draft: it has {opened[0].vocab_size} tokens in its vocabulary, the model "
                            f"{captured.vocab_size}; give a model of the same tokenizer")
        try:
            refuse_other_tokenizer(checkpoint.folder, opened[1].folder, "draft")
        except ValueError as error:
            raise PlanError(str(error)) from error
        require_states(opened[0].states, "rewindable", "draft")
        self._copied = draft_format(draft) is not None
        self._own = ModelPlanner(captured, checkpoint, files, budget, machine)
        self._draft = ModelPlanner(*opened, budget, machine)
        self._seen = DraftsSeen(checkpoint.fingerprint, opened[1].fingerprint, _assumed(draft))

    def replayed(self, plan: Plan, options: Options) -> PlannedSteps:
        """Replay like without a draft: a replayed plan was made without one."""
        return self._own.replayed(plan, options)

    def planned(self, workload: Workload, options: Options, choose: PlanChoice) -> PlannedSteps:
        plain = self._plan_alone(workload, options, choose)
        asked, work = _draft_options(options, plain.plan.schedule.batching.admitted), plain.plan.workload
        limit = self._draft.captured.max_positions or NO_LIMIT
        prompt = min(work.prompt + 1, limit - 1)  # the answer's first token is known when drafts begin
        work = work.of(work.batch, prompt, min(work.new_tokens, limit - prompt))
        task = self._draft.task(work, asked)
        pipeline = task.pipeline(task.schedules()[0])
        split = self._best((plain.pipeline, plain.plan, options), (pipeline, asked))
        seen = self._seen if split.shared is None else self._seen_with(split.shared.packed)
        steps = PlannedSteps(split.pipeline, split.plan, drafts=PlannedDrafts(split, seen, seen.chance))
        if split.shared is not None:
            return self._with_shared(steps, split.shared, seen)
        return steps if split.draft is None else self._with_helper(steps, pipeline, split.draft, asked)

    def _with_shared(self, steps: PlannedSteps, shared: SharedPlan, seen: DraftsSeen) -> PlannedSteps:
        """The steps, with one that drafts in their memory and the copies that fill what is its own."""
        require_within(shared.draft, self._own.budget)
        own = replace(shared.draft, weights=tuple(w for w in shared.draft.weights if w.name in shared.own))
        load = tuple(resident_copies(own, self._files_of(shared.own)))
        return replace(steps, shared_draft=SharedDraft(shared.draft, shared.program, load, seen),
                       more_files=(self._draft.checkpoint,))

    def _with_helper(self, steps: PlannedSteps, pipeline: Pipeline, plan: Plan, options: Options) -> PlannedSteps:
        """The steps, with a model that drafts by `plan` in a part of the budget."""
        whole, part = self._own.budget, plan.budget
        require_within(steps.plan, replace(whole, device=whole.device - part.device))
        draft, budget = self._draft, replace(whole, device=part.device, host=part.host)
        helper = LanguageModel(
            draft.captured, draft.checkpoint, draft.files, budget, plan.workload,
            replace(options, prefix_cache=None, cache_dir=None), draft.machine,
            choose=lambda *_: (pipeline, plan), planner_of=lambda *_: draft.within(budget))
        helper.drafts_seen = self._seen
        return replace(steps, helper=helper)

    def _plan_alone(self, workload: Workload, options: Options, choose: PlanChoice) -> PlannedSteps:
        """The model's plan as if nothing drafted. Where drafts are forced and the budget is too small for that already,
        it is as if there were no budget: what both need is then named, not what one needs."""
        try:
            return self._own.planned(workload, options, choose)
        except PlanError:
            if not isinstance(options.prompt_lookup_num_tokens, int):
                raise
        return self._own.within(replace(self._own.budget, device=NO_LIMIT)).planned(workload, options, choose)

    def _best(self, model: tuple[Pipeline, Plan, Options], draft: tuple[Pipeline, Options]) -> DraftedPlan:
        """By a copy of the model, in memory of its own or in the model's, whichever is predicted to answer sooner; any
        other draft has its own. PlanError where drafts are forced and there is room for neither."""
        budget = self._own.budget
        apart = partial(draft_apart, model, draft, budget, self._seen.chance)
        beside = partial(draft_beside, model, self._copy(model[1]), budget,
                         lambda packed: self._seen_with(packed).chance)
        return plan_draft(model, (apart, beside)[: 1 + self._copied])

    def _seen_with(self, packed: float) -> DraftsSeen:
        """Return how many tokens stood of those that steps of the model gave with about such a share of its weights
        packed; they are assumed to be refused as seldom as that is small."""
        name = f"{self._draft.checkpoint.fingerprint} sharing {round(10 * packed)}"
        return DraftsSeen(self._own.checkpoint.fingerprint, name, 1 - packed * (1 - self._seen.assumed))

    @cached_property
    def _packed(self) -> dict[str, int]:
        """Bytes of the weights that the copy has in fewer than the model."""
        weights = self._draft.captured.weights
        return {name: file.nbytes for name, file in self._draft.files.items()
                if weights[name].stored is not None and file.nbytes < self._own.files[name].nbytes}

    def _copy(self, plan: Plan) -> PackedCopy:
        """The weights of the copy, for steps of this model as long as the plan's."""
        model = self._own

        def pipeline(own: Collection[str]) -> Pipeline:
            packed = {name: self._draft.captured.weights[name] if name in own and name in self._packed else spec
                      for name, spec in model.captured.weights.items()}
            graphs = ModelGraphs.of(replace(model.captured, weights=packed), self._files_of(own),
                                    f"{model.fingerprint} drafting", model.machine, model.switches,
                                    Options(cache=plan.cache_format))
            return Pipeline(replace(graphs(plan.workload, ALONE), prefill=None), plan.workload, model.machine,
                            model.switches)

        return PackedCopy(self._packed, pipeline)

    def _files_of(self, own: Collection[str]) -> dict[str, FileSlice]:
        """Return the files of the weights of a draft step, of which those `own` are the copy's where it has them
        packed."""
        return {name: self._draft.files[name] if name in own and name in self._packed else file
                for name, file in self._own.files.items()}


def _assumed(draft: str | os.PathLike[str]) -> float:
    """The share of tokens that is taken to stand before any was checked."""
    format = draft_format(draft)
    return ASSUMED if format is None else COPY_STANDS[format.bits]


def _draft_options(options: Options, admitted: int = 0) -> Options:
    """Its cache stays on the device, for what comes from elsewhere would come for each drafted token; sequences enter
    its slots as they do the model's, so many at once."""
    return Options(cache=options.cache, cache_tier="device", admitted=admitted or None)
