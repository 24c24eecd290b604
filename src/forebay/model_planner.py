"""The plan provider of a language model: it plans steps for a workload within a budget."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

from forebay.drafts_seen import KNOWN, DraftsSeen
from forebay.kept_plans import keep_plan, plan_key, read_plan
from forebay.rewriter.checkpoints.checkpoint import Checkpoint
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Workload
from forebay.rewriter.ir.program import FileSlice, Program
from forebay.rewriter.ir.shared_draft import SharedDraft
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.plan_draft import DraftedPlan, token_time_s
from forebay.rewriter.pipeline.plan_search import finish
from forebay.rewriter.pipeline.plan_task import ModelGraphs, PlanChoice, PlanTask
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.options import Options
from forebay.rewriter.planning.other_kinds import without_choices
from forebay.rewriter.switches import read_switches
from forebay.runtime.run.room import with_rope_switch

LOG = logging.getLogger("forebay")
MIN_DROP = 0.02  # of the share of accepted drafts, since a plan was made for it, for another plan to be made


@dataclass(frozen=True)
class PlannedDrafts:
    """The draft of a plan, or the reason why there is none.

    Attributes:
        split: Both plans, and how they were compared.
        seen: How many drafted tokens were accepted.
        expected: The share of them that was expected when this was planned.
    """

    split: DraftedPlan
    seen: DraftsSeen
    expected: float

    def __str__(self) -> str:
        return f"{self.split.told}; {self.seen}"

    @property
    def outdated(self) -> bool:
        """Whether so few drafts are accepted that the whole budget without them is predicted to do better."""
        split, chance = self.split, self.seen.chance
        if split.drafting is None or self.seen.known < KNOWN:
            return False
        with_s = token_time_s(split.plan, split.drafting, chance, split.shared is None)
        return with_s > split.plain_time_s > 0 and chance < self.expected - MIN_DROP


@dataclass(frozen=True)
class PlannedSteps:
    """A plan, and all that a session needs beside it.

    Attributes:
        pipeline: The source of the plan's Programs.
        plan: The plan.
        helper: The `LanguageModel` that drafts, in a part of the budget.
        shared_draft: The step of the model itself that drafts, in its memory.
        drafts: How the draft was chosen, where one was given.
        more_files: Checkpoints that the steps read besides the model's own.
    """

    pipeline: Pipeline
    plan: Plan
    helper: Any = None
    shared_draft: SharedDraft | None = None
    drafts: PlannedDrafts | None = None
    more_files: tuple[Checkpoint, ...] = ()

    def program(self, tokens: int) -> Program:
        """Return the verified Program of a step over `tokens` tokens per sequence."""
        return self.pipeline.program(self.plan, tokens)


class PlanProvider(Protocol):
    """Makes the plans of a `LanguageModel`; PlanError where the budget holds none."""

    def planned(self, workload: Workload, options: Options, choose: PlanChoice) -> PlannedSteps:
        """Plan for (at least) `workload`."""

    def replayed(self, plan: Plan, options: Options) -> PlannedSteps:
        """Take a plan that was made before."""


class ModelPlanner:
    """Plans a model by itself."""

    def __init__(
        self, captured: CapturedModel, checkpoint: Checkpoint, files: dict[str, FileSlice], budget: Budget,
        machine: Machine, part: str = "",
    ) -> None:
        self.captured, self.checkpoint, self.files, self.budget = captured, checkpoint, files, budget
        self.machine, self.switches = machine, read_switches()
        self.fingerprint = f"{checkpoint.fingerprint} {part}" if part else checkpoint.fingerprint
        self._graphs_kept_as = "" if part else captured.kept_as
        self._graphs: ModelGraphs | None = None  # after the block passes, whatever the workload

    def within(self, budget: Budget) -> Self:
        """Return a planner of the same model in another budget."""
        other = copy.copy(self)
        other.budget = budget
        return other

    def planned(self, workload: Workload, options: Options, choose: PlanChoice) -> PlannedSteps:
        task = self.task(self.fitted(workload), options)
        key = plan_key(task, self._graphs_kept_as, choose)
        if key is not None and (plan := read_plan(key, self.budget)) is not None:
            try:
                return self.replayed(plan, options)
            except PlanError as error:
                LOG.debug("the plan kept as %s is made again: %s", key, error)
        pipeline, plan = finish(task, choose(task))
        if key is not None:
            keep_plan(key, plan, self.budget)
        return PlannedSteps(pipeline, plan)

    def replayed(self, plan: Plan, options: Options) -> PlannedSteps:
        pipeline = self.task(self._within_positions(plan.workload), options).pipeline(plan.schedule.batching)
        return PlannedSteps(pipeline, pipeline.replay(plan))

    def task(self, workload: Workload, options: Options) -> PlanTask:
        """Return the planning task of a workload."""
        if self._graphs is None:
            self._graphs = ModelGraphs.of(self.captured, self.files, self.fingerprint, self.machine, self.switches,
                                          options)
        return PlanTask(self._graphs, self.budget, workload, options, self.machine, self.switches)

    def fitted(self, workload: Workload) -> Workload:
        """The part of `workload` for which the model has positions, with room for a prompt that runs anew."""
        workload = self._within_positions(workload)
        return workload.of(workload.batch,
                           *with_rope_switch(workload.prompt, workload.new_tokens, self.captured.rope_switch_length))

    def _within_positions(self, workload: Workload) -> Workload:
        limit = self.captured.max_positions
        if not limit or workload.context <= limit:
            return workload
        if workload.prompt + 1 > limit:
            raise PlanError(f"a prompt of {workload.prompt} tokens does not fit the model's {limit} positions")
        return workload.of(workload.batch, workload.prompt, limit - workload.prompt)


class KindPlanner(ModelPlanner):
    """Plans steps of another kind than a user has planned, under the same options where the budget has room for them.
    """

    def planned(self, workload: Workload, options: Options, choose: PlanChoice) -> PlannedSteps:
        try:
            return super().planned(workload, options, choose)
        except PlanError as error:
            free, left = without_choices(options)
            if not left:
                raise
            found = super().planned(workload, free, choose)
            LOG.warning("%s: left to the planner for calls with images, embeddings or logits of all tokens: %s",
                        ", ".join(left), error)
            return found


PlannerOf = Callable[[CapturedModel, Checkpoint, dict[str, FileSlice], Budget, Machine], PlanProvider]
