"""The plans of ranks that run a model together: each plans by itself, then all take steps that all can follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from forebay.rewriter.capture.step_graphs import StepGraphs, step_graphs
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.plan import MOVING, Budget, Plan, PlanError, Workload
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.share import RankShare
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.plan_block import GraphsOf, PlanChoice, plan_block
from forebay.rewriter.pipeline.plan_speculation import plan_speculation
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.pipeline.shard_captured import rank_files, shard_captured
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.options import Options
from forebay.rewriter.predict.ranks import beside_readers
from forebay.rewriter.switches import Switches

Planned = tuple[Pipeline, Plan]
FromAll = Callable[[list[Any]], list[Any]]  # of what some ranks say, what all say, by rank


@dataclass(frozen=True)
class Steps:
    """What ranks must have alike of their plans: which steps there are, in which order each computes what, and in what
    format caches keep it. Where a rank's weights and caches lie, and in what pieces they come, is its own affair."""

    workload: Workload
    micro_batches: int
    order: Literal["row", "zigzag"]
    entering: int
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
        """What takes less memory comes first."""
        return self.workload.batch // self.micro_batches, self.prefill_chunk, self.workload.batch

    def wished(self, options: Options) -> Options:
        """What is wished, with these steps."""
        return replace(options, micro_batches=self.micro_batches, order=self.order, entering=self.entering or None,
                       prefill_chunk=self.prefill_chunk, gather_buffers=self.gather_buffers)


@dataclass(frozen=True)
class RankPlanner:
    """What plans one rank's part of a model."""

    share: RankShare
    graphs_of: GraphsOf
    budget: Budget
    options: Options
    machine: Machine
    switches: Switches

    def planned(self, workload: Workload, choose: PlanChoice) -> Planned:
        return choose(self.graphs_of, self.budget, workload, self.options, self.machine, self.switches)

    def follow(self, asked: Steps) -> Planned:
        """A plan with these steps; PlanError where there is none."""
        found = plan_block(self.graphs_of, self.budget, asked.workload, asked.wished(self.options), self.machine,
                           self.switches)
        if Steps.of(found[1]) != asked:
            raise PlanError(f"{self.share.name} has no steps of {asked.workload.batch} sequences in "
                            f"{asked.micro_batches} micro-batches and chunks of {asked.prefill_chunk} tokens")
        return found


def plan_together(
    ranks: Sequence[RankPlanner], workload: Workload, choose: PlanChoice = plan_block, gather: FromAll = list
) -> list[Planned]:
    """The plans of some ranks; what they say of them `gather` brings together with what all others say. All take the
    steps of one of the plans: of those that all can follow within their budgets the first, least memory last.
    PlanError, the same on all ranks, names one that cannot."""
    together = ranks[0].share.sharers * (ranks[0].options.micro_batches or 1)  # sequences, as many of each rank
    workload = replace(workload, batch=-(-workload.batch // together) * together)
    own = [_tried(partial(rank.planned, workload, choose)) for rank in ranks]
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
    """The plans, or such with the steps that check drafts which every rank would take for itself. PlanError, the same
    on all ranks, where a number of drafted tokens is wished and one has no room."""
    wished = [asked.wished(rank.options) for rank in ranks]
    if wished[0].prompt_lookup_num_tokens is None:
        return planned
    forced = wished[0].prompt_lookup_num_tokens != "auto"
    own = [_tried(partial(plan_speculation, *mine, rank.budget, options))
           for mine, rank, options in zip(planned, ranks, wished, strict=True)]
    said = gather([each if isinstance(each, str) else each[1].schedule.speculative_steps for each in own])
    if forced:
        require_all(said)
    sizes = tuple(size for size in said[0] if all(size in steps for steps in said))
    found = [mine if isinstance(mine, str) or mine[1].schedule.speculative_steps == sizes else _tried(
        partial(_with_sizes, before[0], sizes, rank.budget, options))
        for mine, before, rank, options in zip(own, planned, ranks, wished, strict=True)] if sizes else planned
    refused = gather([each if isinstance(each, str) else "" for each in found])
    if forced:
        require_all([text or None for text in refused])
    return planned if any(refused) else [each for each in found if not isinstance(each, str)]


def _with_sizes(pipeline: Pipeline, sizes: tuple[int, ...], budget: Budget, options: Options) -> Planned:
    checking = pipeline.with_speculative(sizes)
    return checking, checking.plan(budget, options)


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
    """What is made, or in words why not."""
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
    """What is wished of a rank. PlanError for what ranks cannot do: hidden states of a stage that leave the device,
    which the next stage may still read; where each attends for sequences of its own, what moves these or their caches.
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
        if options.entering:
            raise PlanError("places: with attention=batch each rank has sequences of its own, which begin together; "
                            "leave places out, or take attention=heads")
        options = replace(options, cache_tier="device", rounds=True)
    return options


def rank_planners(
    captured: CapturedModel, fingerprint: str, files: Mapping[str, FileSlice], mesh: RankShare, budget: Budget,
    options: Options, machine: Machine, switches: Switches
) -> list[tuple[CapturedModel, RankPlanner]]:
    """Every rank's part of a model and its planner, in one process, of which none exchanges anything; all ranks are to
    run on this machine."""
    found = []
    options, own = rank_options(mesh, options), beside_readers(machine, mesh.ranks)
    for rank in range(mesh.ranks):
        share = replace(mesh, rank=rank)
        sharded, parts = shard_captured(captured, share, switches)
        fused = rewrite_captured(sharded, switches, options.cache, options.activations)
        graphs_of = partial(_graphs, fused, rank_files(captured, parts, files), f"{fingerprint} {share.name}",
                            machine.kind.host_hop)
        found.append((sharded, RankPlanner(share, graphs_of, budget, options, own, switches)))
    return found


def _graphs(fused: CapturedModel, files: Mapping[str, FileSlice], fingerprint: str, host_hop: bool, workload: Workload,
            batching: BatchSchedule) -> StepGraphs:
    """As a rank has them (`MeshPlanner`)."""
    return step_graphs(fused, files, workload, fingerprint, host_hop=host_hop, batching=batching)
