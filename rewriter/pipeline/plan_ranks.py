"""The plans of ranks that run a model together: each plans by itself, then all take steps that all can follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.plan import MOVING, Budget, Plan, PlanError, Workload
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.ir.share import RankShare
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.plan_search import finish, plan_batch
from forebay.rewriter.pipeline.plan_task import ModelGraphs, PlanChoice, Planned, PlanTask
from forebay.rewriter.pipeline.shard_captured import rank_files, shard_captured
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.options import Options
from forebay.rewriter.predict.ranks import beside_readers
from forebay.rewriter.switches import read_switches

FromAll = Callable[[list[Any]], list[Any]]  # of what some ranks say, what all say, by rank


@dataclass(frozen=True)
class Steps:
    """The settings that the plans of all ranks must share: which steps there are, in which order each computes what,
    and in what format caches keep it. Where a rank's weights and caches lie, and in what pieces they come, is its own
    affair."""

    workload: Workload
    micro_batches: int
    order: Literal["row", "zigzag"]
    admitted: int
    prefill_chunk: int
    cache_format: str
    gather_buffers: int
    speculative_steps: tuple[int, ...]

    @staticmethod
    def of(plan: Plan) -> Steps:
        batching = plan.schedule.batching
        return Steps(plan.workload, batching.micro_batches.count, batching.micro_batches.order,
                     batching.admitted,
                     plan.schedule.prefill_chunk, plan.cache_format, batching.gathering.buffers,
                     plan.schedule.speculative_steps)

    @property
    def size(self) -> tuple[int, int, int]:
        """Sort key: less memory comes first."""
        return self.workload.batch // self.micro_batches, self.prefill_chunk, self.workload.batch

    def wished(self, options: Options) -> Options:
        """Return the options with these steps."""
        return replace(options, micro_batches=self.micro_batches, order=self.order, admitted=self.admitted or None,
                       prefill_chunk=self.prefill_chunk, gather_buffers=self.gather_buffers)


@dataclass(frozen=True)
class RankPlanner:
    """Planner of one rank's part of a model."""

    share: RankShare
    task: PlanTask

    def planned(self, choose: PlanChoice) -> Planned:
        """A plan for whole sequences of each rank and micro-batch."""
        workload, options = self.task.workload, self.task.options
        together = self.share.sharers * (options.micro_batches or 1)  # sequences, as many of each rank
        return choose(self.task.for_batch(-(-workload.batch // together) * together))

    def with_steps(self, asked: Steps) -> PlanTask:
        """Return the task with these steps."""
        return replace(self.task, workload=asked.workload, options=asked.wished(self.task.options))

    def follow(self, asked: Steps) -> Planned:
        """A plan with these steps; PlanError where there is none."""
        found = plan_batch(self.with_steps(asked))
        if Steps.of(found[1]) != asked:
            raise PlanError(f"{self.share.name} has no steps of {asked.workload.batch} sequences in "
                            f"{asked.micro_batches} micro-batches and chunks of {asked.prefill_chunk} tokens")
        return found


def plan_together(
    ranks: Sequence[RankPlanner], choose: PlanChoice = plan_batch, gather: FromAll = list
) -> list[Planned]:
    """The plans of some ranks; what they say of them `gather` brings together with what all others say. All take the
    steps of one of the plans: of those that all can follow within their budgets the first, least memory last.
    PlanError, the same on all ranks, names one that cannot."""
    own = [_tried(partial(rank.planned, choose)) for rank in ranks]
    proposals = gather([found if isinstance(found, str) else Steps.of(found[1]) for found in own])
    require_all(proposals)
    refused = ""
    for asked in sorted(dict.fromkeys(proposals), key=lambda p: p.size, reverse=True):  # in one order on all ranks
        found = [mine if not isinstance(mine, str) and Steps.of(mine[1]) == asked else _tried(
            partial(rank.follow, asked)) for rank, mine in zip(ranks, own, strict=True)]
        answers = gather([each if isinstance(each, str) else "" for each in found])
        refused = next((f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer), "")
        if not refused:
            planned = [each for each in found if not isinstance(each, str)]
            return _common(_checking_drafts(ranks, planned, asked, gather), gather)
    raise PlanError(f"no plan of one rank suits all: {refused}")


def _checking_drafts(
    ranks: Sequence[RankPlanner], planned: Sequence[Planned], asked: Steps, gather: FromAll
) -> Sequence[Planned]:
    """The plans, or such with the steps that check drafts which every rank would take for itself."""
    tasks = [rank.with_steps(asked) for rank in ranks]
    if tasks[0].options.prompt_lookup_num_tokens != "auto":  # a number of them is among the steps that all take
        return planned
    own = [*map(finish, tasks, planned)]
    said = gather([plan.schedule.speculative_steps for _, plan in own])
    sizes = tuple(size for size in said[0] if all(size in steps for steps in said))
    found = [mine if mine[1].schedule.speculative_steps == sizes else _tried(
        partial(_with_sizes, before[0], sizes, task))
        for mine, before, task in zip(own, planned, tasks, strict=True)] if sizes else planned
    refused = gather([each if isinstance(each, str) else "" for each in found])
    return planned if any(refused) else [each for each in found if not isinstance(each, str)]


def _with_sizes(pipeline: Pipeline, sizes: tuple[int, ...], task: PlanTask) -> Planned:
    checking = pipeline.with_speculative(sizes)
    return checking, checking.plan(task.budget, task.options)


def require_all(said: Sequence[Any]) -> None:
    """PlanError for the first rank that says, in words, why it has no plan."""
    failed = next(((rank, text) for rank, text in enumerate(said) if isinstance(text, str)), None)
    if failed is not None:
        raise PlanError(f"rank {failed[0]}: {failed[1]}")


def require_alike(plans: Sequence[Any]) -> None:
    """PlanError unless all ranks' replayed plans have the same steps; `plans` are `Steps` with sizes of chunks, or in
    words why a rank's cannot be replayed."""
    require_all(plans)
    other = next((rank for rank, steps in enumerate(plans) if steps != plans[0]), None)
    if other is not None:
        raise PlanError(f"the plan of rank {other} has other steps than that of rank 0: they were not made together; "
                        "plan all ranks again")


def _tried(make: Callable[[], Planned]) -> Planned | str:
    """Return the plan, or the reason for its failure as text."""
    try:
        return make()
    except PlanError as error:
        return str(error)


def _common(planned: Sequence[Planned], gather: FromAll) -> list[Planned]:
    """The plans with those sizes of prefill steps alone that all ranks have."""
    chunks = gather([plan.schedule.prefill_chunks for _, plan in planned])
    common = set.intersection(*map(set, chunks))
    return [_with_chunks(pipeline, plan, tuple(c for c in plan.schedule.prefill_chunks if c in common))
            for pipeline, plan in planned]


def _with_chunks(pipeline: Pipeline, plan: Plan, chunks: tuple[int, ...]) -> Planned:
    if chunks == plan.schedule.prefill_chunks:
        return pipeline, plan
    bare = replace(plan, schedule=replace(plan.schedule, prefill_chunks=chunks), gemm=(),
                   buffers=tuple(b for b in plan.buffers if b.kind not in MOVING or b.phase == "all"))
    return pipeline, pipeline.complete(bare)


def rank_options(share: RankShare, options: Options) -> Options:
    """Return the options for one rank. PlanError for what ranks cannot do: hidden states of a stage that leave the
    device, which the next stage may still read; where each attends for sequences of its own, what moves these or their
    caches.
    """
    if share.gather_buffers is not None:
        options = replace(options, gather_buffers=share.gather_buffers)
    if share.stages > 1:
        if options.hidden_tier not in (None, "device"):
            raise PlanError(f"hidden_tier {options.hidden_tier}: the next stage may still read them; leave stages out")
        if options.score_ranges:
            raise PlanError("calibration: it numbers the layers of one device; leave stages out")
        options = replace(options, hidden_tier="device")
    if share.sharers > 1:
        if options.cache_tier not in (None, "device"):
            raise PlanError(f"cache_tier {options.cache_tier}: with attention=batch each rank keeps the caches of its "
                            "own sequences on the device; leave cache_tier out, or take attention=heads")
        if options.admitted:
            raise PlanError("batch_slots: with attention=batch each rank has sequences of its own, which begin "
                            "together; leave batch_slots out, or take attention=heads")
        options = replace(options, cache_tier="device", rounds=True)
    return options


def rank_planners(
    captured: CapturedModel, fingerprint: str, files: Mapping[str, FileSlice], mesh: RankShare, budget: Budget,
    workload: Workload, options: Options, machine: Machine
) -> list[tuple[CapturedModel, RankPlanner]]:
    """Every rank's part of a model and its planner, in one process, of which none exchanges anything; all ranks are to
    run on this machine."""
    found, switches = [], read_switches()
    options, own = rank_options(mesh, options), beside_readers(machine, mesh.ranks)
    for rank in range(mesh.ranks):
        share = replace(mesh, rank=rank)
        sharded, parts = shard_captured(captured, share, switches)
        graphs = ModelGraphs.of(sharded, rank_files(captured, parts, files), f"{fingerprint} {share.name}", machine,
                                switches, options)
        found.append((sharded, RankPlanner(share, PlanTask(graphs, budget, workload, options, own, switches))))
    return found
