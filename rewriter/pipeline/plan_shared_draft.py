"""Choose how much of a budget steps that draft for their own model may have, whose memory they share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from forebay.rewriter.ir.alignment import aligned, whole_pages
from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.plan import Budget, Plan, PlanError
from forebay.rewriter.ir.program import DEVICE, Program
from forebay.rewriter.pipeline.lay_beside import apart, check_beside, laid_beside
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.features.speculation import forced_sizes
from forebay.rewriter.planning.options import Options
from forebay.rewriter.planning.planner import host_rows_nbytes

LOG = logging.getLogger("forebay")
MAX_TRIES = 8  # plans of the model, each with more room beside it than the one before
ROOM_MARGIN = 1.02  # times what is figured to be lacking
UNLIMITED = Budget(1 << 50)  # of a plan that is laid into another's memory


@dataclass(frozen=True)
class PackedCopy:
    """The weights of a model in fewer bits: nbytes of each by name, and what makes the pipeline of its decode steps in
    which those named are packed, all others as the model has them."""

    nbytes: Mapping[str, int]
    pipeline: Callable[[Collection[str]], Pipeline]


@dataclass(frozen=True)
class SharedPlan:
    """The model's plan in the rest of the budget with its pipeline, and the draft's step beside it: its plan, the
    Program, which weights are its own, and what share of the bytes that its products read in the model is `packed`."""

    pipeline: Pipeline
    plan: Plan
    draft: Plan
    program: Program
    own: tuple[str, ...]
    packed: float


def checking_drafts(pipeline: Pipeline, options: Options) -> Pipeline:
    """The pipeline with the steps that a number of drafted tokens asks for. PlanError where there are none."""
    return pipeline.with_speculative(forced_sizes(pipeline.graphs, pipeline.workload, options))


def plan_shared_draft(
    pipeline: Pipeline, plain: Plan, options: Options, copy: PackedCopy, budget: Budget, tokens: int
) -> SharedPlan:
    """Plan steps of the model that check `tokens` drafted tokens within `budget`, and beside them the step that drafts:
    what streams there is resident here, packed. The more room that takes, the more streams, so parts are tried until
    one holds what it leads to. PlanError where none does, and for plans whose cache such a step does not find in one
    piece on the device."""
    if pipeline.graphs.speculate is None:
        raise PlanError("no step checks drafts in models whose rotary follows the length of the call")
    plan, checking, part = plain, pipeline, 0
    checked = replace(options, prompt_lookup_num_tokens=tokens)
    for _ in range(MAX_TRIES):
        _refuse_scattered(plan)
        own = _own(plan, pipeline)
        if not own:
            raise PlanError("no weight streams, so steps of its own would gain nothing")
        rows = _nbytes(own, plan, copy)
        needed = rows + whole_pages(pipeline.need(1).activations)
        if needed <= part:
            found = _beside(copy.pipeline(own), plan, budget)
            top = found[0].arenas[DEVICE]  # beside which both take workspace, each in its time
            over = max(top + found[1].workspace_nbytes() - budget.device, top - plan.arenas[DEVICE] - part)
            if over <= 0:
                draft = replace(found[0], budget=budget.limits)
                return SharedPlan(checking, plan, draft, found[1], own, _share(own, pipeline, copy))
            needed = part + over
        streams = sum(plan.weight(name).nbytes for name in own)
        grows = 1 - min(0.75, rows / streams)  # what it takes of resident weights needs rows too
        part += int(ROOM_MARGIN * (needed - part) / grows)
        rest = Budget(budget.device - part, budget.host, budget.disk)
        try:
            plan = (checking := checking_drafts(pipeline, checked)).plan(rest, checked)
        except PlanError as error:
            LOG.debug("with %d bytes for a draft's step: %s", part, error)
            break
    raise PlanError(f"a device budget of {format_nbytes(budget.device)} has no room for packed rows of the streamed "
                    "weights next to the resident ones")


def _refuse_scattered(plan: Plan) -> None:
    batching = plan.schedule.batching
    if batching.cache.staged or batching.micro_batches.count > 1:
        raise PlanError("its own steps draft where the whole cache lies on the device, of one micro-batch")


def _own(plan: Plan, pipeline: Pipeline) -> tuple[str, ...]:
    """The weights that a step without streams needs beside those that `plan` keeps on the device."""
    read = {use.name for use in pipeline.needs.uses if use.product or not use.lookup}
    return tuple(w.name for w in plan.weights if w.tier != DEVICE and w.name in read)


def _nbytes(own: Collection[str], plan: Plan, copy: PackedCopy) -> int:
    return sum(aligned(copy.nbytes.get(name, plan.weight(name).nbytes)) for name in own)


def _share(own: Collection[str], pipeline: Pipeline, copy: PackedCopy) -> float:
    read = {use.name: use.nbytes for use in pipeline.needs.uses if use.product}
    return sum(n for name, n in read.items() if name in own and name in copy.nbytes) / sum(read.values())


def _beside(pipeline: Pipeline, plan: Plan, budget: Budget) -> tuple[Plan, Program]:
    """The draft's step in the memory of `plan`, and its Program, proved by itself and beside the model's plan."""
    alone = pipeline.plan(Budget(UNLIMITED.device, budget.host), Options(
        cache=plan.cache_format, cache_tier="device", prefill_chunk=1))
    looked_up = {use.name for use in pipeline.needs.uses if use.lookup and not use.product}
    limits = Budget(UNLIMITED.device, budget.host).limits
    draft = pipeline.replay(laid_beside(alone, plan, looked_up, host_rows_nbytes(pipeline.needs, 1), limits))
    program = pipeline.program(draft, 1)
    check_beside(program, draft, plan)
    return draft, apart(program)
