"""A language model that several processes run together, each with its stage's layers or its part of every layer, its
plan and its budget."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from forebay.api import LOG, LanguageModel
from forebay.rewriter.capture.step_graphs import StepGraphs
from forebay.rewriter.ir.block import Block
from forebay.rewriter.ir.graph import CapturedModel, Gives
from forebay.rewriter.ir.plan import MOVING, Plan, PlanError, Workload
from forebay.rewriter.ir.share import RankShare
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline import Pipeline
from forebay.rewriter.plan_block import PlanChoice, plan_block
from forebay.rewriter.planning.wishes import Wishes
from forebay.rewriter.shard_captured import rank_files, shard_captured
from forebay.rewriter.switches import read_switches
from forebay.runtime.comm.ranks import from_all, join_ranks, require_same_exchanges, tell_others
from forebay.runtime.run.places import Asked
from forebay.runtime.run.session import Session


@dataclass(frozen=True)
class Steps:
    """What ranks must have alike of their plans: which steps there are, and in which order each computes what. Where a
    rank's weights and caches lie, and in what pieces they come, is its own affair."""

    workload: Workload
    micro_batches: int
    order: Literal["row", "zigzag"]
    entering: int
    joined: bool
    prefill_chunk: int

    @staticmethod
    def of(plan: Plan) -> Steps:
        block = plan.schedule.block
        return Steps(plan.workload, block.micro_batches, block.order, block.entering, block.joined,
                     plan.schedule.prefill_chunk)

    @property
    def size(self) -> tuple[int, int, int]:
        """What takes less memory comes first."""
        return self.workload.batch // self.micro_batches, self.prefill_chunk, self.workload.batch

    def wished(self, wishes: Wishes) -> Wishes:
        """What is wished, with these steps."""
        return replace(wishes, micro_batches=self.micro_batches, order=self.order, entering=self.entering or None,
                       joined=self.joined, prefill_chunk=self.prefill_chunk)


class ShardedModel(LanguageModel):
    """One rank's part of a model. All ranks call the same methods with the same arguments, as under torchrun; each gets
    the whole answer."""

    def __init__(
        self, share: RankShare, captured: CapturedModel, checkpoint: Any, files: Any, budget: Any,
        workload: Workload, wishes: Wishes, machine: Machine | None = None, plan: Plan | None = None,
        choose: PlanChoice = plan_block,
    ) -> None:
        rank, ranks = join_ranks("cpu" if machine is None else machine.device_kind)
        self.share = replace(share, rank=rank)
        if self.share.ranks != ranks:
            raise PlanError(f"mesh: {share.mesh} has {self.share.ranks} ranks, and {ranks} processes "
                            f"run; start as many with torchrun --nproc-per-node={self.share.ranks}")
        if wishes.drafted_tokens not in (None, "auto"):
            raise PlanError("prompt_lookup_num_tokens: steps that check drafts are for one device; leave one out")
        if share.stages > 1:
            wishes = _of_stage(wishes)
        if share.sharers > 1:
            wishes = _of_own_sequences(wishes)
        sharded, parts = shard_captured(captured, self.share, read_switches())
        super().__init__(sharded, checkpoint, rank_files(captured, parts, files), budget, workload,
                         replace(wishes, drafted_tokens=None), machine, plan, choose)

    def _graphs(self, workload: Workload, block: Block) -> StepGraphs:
        """Graphs of this part of the model, which no other part's plan suits."""
        return replace(super()._graphs(workload, block), speculate=None,
                       fingerprint=f"{self.checkpoint.fingerprint} {self.share.name}")

    def giving(self, gives: Gives, embeds: bool = False) -> LanguageModel:
        """This model, whose steps give logits of one token. PlanError for others: they are for one device."""
        if (gives, embeds) != ("last", False):
            raise PlanError("mesh: steps that give something else than the logits of the last token (scores, logits of "
                            "all tokens), or take embeddings, are for one device; leave mesh out")
        return self

    # -- plans that go together

    def _plan_anew(self, workload: Workload, wishes: Wishes, choose: PlanChoice) -> tuple[Pipeline, Plan]:
        """Each rank plans by itself; then all take the steps of one of these plans: of those that all can follow within
        their budgets the first, least memory last. PlanError, the same on all ranks, names one that cannot."""
        own: tuple[Pipeline, Plan] | None = None
        together = self.share.sharers * (wishes.micro_batches or 1)  # sequences, of which each rank has as many
        workload = replace(workload, batch=-(-workload.batch // together) * together)
        try:
            own = choose(self._graphs, self.budget, workload, wishes, self.machine, self.switches)
            said: Steps | str = Steps.of(own[1])
        except PlanError as error:
            said = str(error)
        except BaseException as error:
            tell_others(error)
            raise
        proposals = from_all(said)
        failed = [(rank, text) for rank, text in enumerate(proposals) if isinstance(text, str)]
        if failed:
            raise PlanError(f"rank {failed[0][0]}: {failed[0][1]}")
        different = dict.fromkeys(p for p in proposals if isinstance(p, Steps))  # in one order on all ranks
        steps = sorted(different, key=lambda p: p.size, reverse=True)
        refused = ""
        for asked in steps:
            try:
                found = own if own is not None and Steps.of(own[1]) == asked else self._follow(asked, wishes)
                text = ""
            except PlanError as error:
                found, text = None, str(error)
            answers = from_all(text)
            refused = next((f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer), "")
            if not refused:
                assert found is not None
                return self._common(*found)
        raise PlanError(f"no plan of one rank suits all: {refused}")

    def _follow(self, asked: Steps, wishes: Wishes) -> tuple[Pipeline, Plan]:
        found = plan_block(
            self._graphs, self.budget, asked.workload, asked.wished(wishes), self.machine, self.switches)
        if Steps.of(found[1]) != asked:
            raise PlanError(f"{self.share.name} has no steps of {asked.workload.batch} sequences in "
                            f"{asked.micro_batches} micro-batches and chunks of {asked.prefill_chunk} tokens")
        return found

    def _common(self, pipeline: Pipeline, plan: Plan) -> tuple[Pipeline, Plan]:
        """The plan with those sizes of prefill steps alone that all ranks have."""
        chunks = from_all(plan.schedule.prefill_chunks)
        common = tuple(c for c in plan.schedule.prefill_chunks if all(c in theirs for theirs in chunks))
        if common == plan.schedule.prefill_chunks:
            return pipeline, plan
        bare = replace(plan, schedule=replace(plan.schedule, prefill_chunks=common), gemm=(),
                       buffers=tuple(b for b in plan.buffers if b.kind not in MOVING or b.phase == "all"))
        return pipeline, pipeline.complete(bare)

    @property
    def session(self) -> Session:
        """The running session, once it is known that all ranks' Programs exchange alike."""
        if self._session is None:
            plan = self.plan
            require_same_exchanges(
                (f"step over {tokens} tokens", self._pipeline.program(plan, tokens))
                 for tokens in plan.schedule.step_sizes)
        return super().session

    # -- all ranks do the same

    def generate(self, inputs: Any = None, generation_config: Any = None, **options: Any) -> Any:
        """As `LanguageModel.generate`, called alike on every rank: draws are those of rank 0's random state."""
        self._alike("generate", inputs, {k: v for k, v in options.items() if isinstance(v, int | float | str | bool)})
        state = from_all(torch.random.get_rng_state() if self.share.rank == 0 else None)[0]
        if options.get("generator") is None and state is not None:
            torch.random.set_rng_state(state)
        return self._told(lambda: super(ShardedModel, self).generate(inputs, generation_config, **options))

    def answer_all(self, asked: Sequence[Asked], *args: Any, **kwargs: Any) -> Any:
        """As `LanguageModel.answer_all`, with the same prompts on every rank."""
        self._alike("answer_all", [(each.ids, each.new_tokens) for each in asked], {})
        return self._told(lambda: super(ShardedModel, self).answer_all(asked, *args, **kwargs))

    def _told(self, run: Callable[[], Any]) -> Any:
        """What `run` gives; where it fails, the other ranks are told by what."""
        try:
            return run()
        except BaseException as error:
            tell_others(error)
            raise

    def _alike(self, what: str, *given: Any) -> None:
        """ValueError, on all ranks, unless all are given the same."""
        digest = hashlib.sha256(_plain(given).encode()).hexdigest()
        if len(set(from_all(digest))) > 1:
            raise ValueError(f"{what}: ranks were given different arguments; give all the same, as torchrun does")
        LOG.debug("rank %d of %s: %s", self.share.rank, self.share.name, what)


def _of_stage(wishes: Wishes) -> Wishes:
    """What is wished, of a stage: its hidden states stay, because the next stage may still read them. PlanError for
    others."""
    if wishes.hidden_tier not in (None, "device"):
        raise PlanError(f"hidden_tier {wishes.hidden_tier}: the next stage may still read them; leave stages out")
    if wishes.score_ranges:
        raise PlanError("calibration: it numbers the layers of one device; leave stages out")
    return replace(wishes, hidden_tier="device")


def _of_own_sequences(wishes: Wishes) -> Wishes:
    """What is wished, where each rank attends for sequences of its own. PlanError for what moves them or their caches.
    """
    if wishes.cache_tier not in (None, "device"):
        raise PlanError(f"cache_tier {wishes.cache_tier}: with attention=batch each rank keeps the caches of its own "
                        "sequences on the device; leave cache_tier out, or take attention=heads")
    if wishes.entering:
        raise PlanError("places: with attention=batch each rank has sequences of its own, which begin together; leave "
                        "places out, or take attention=heads")
    return replace(wishes, cache_tier="device", rounds=True)


def _plain(value: Any) -> str:
    """Arguments as text, tensors by their numbers."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.flatten().tolist()}"
    if isinstance(value, list | tuple):
        return "[" + " ".join(map(_plain, value)) + "]"
    if hasattr(value, "items"):
        return " ".join(f"{key}={_plain(v)}" for key, v in sorted(value.items()))
    return repr(value)
