"""A language model that several processes run together, each with its stage's layers or its part of every layer, its
plan and its budget."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from forebay.language_model import LOG, LanguageModel
from forebay.open_model import known_machine
from forebay.rewriter.capture.step_graphs import StepGraphs
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.ir.graph import CapturedModel, Gives
from forebay.rewriter.ir.plan import Plan, PlanError, Workload
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.share import RankShare
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.plan_block import PlanChoice, plan_block
from forebay.rewriter.pipeline.plan_ranks import (
    RankPlanner,
    Steps,
    plan_together,
    rank_options,
    require_alike,
    require_all,
)
from forebay.rewriter.pipeline.shard_captured import rank_files, shard_captured
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.options import Options
from forebay.rewriter.predict.ranks import beside_readers
from forebay.rewriter.switches import read_switches
from forebay.runtime.comm.launched import ranks_here
from forebay.runtime.comm.ranks import from_all, join_ranks, require_same_exchanges, tell_others
from forebay.runtime.devices.kinds import HOST
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.scheduler import Request
from forebay.runtime.run.session import Session


class ShardedModel(LanguageModel):
    """One rank's part of a model. All ranks call the same methods with the same arguments, as under torchrun; each gets
    the whole answer."""

    _awaited = False  # whether other ranks may wait for this one's steps

    def __init__(
        self, share: RankShare, captured: CapturedModel, checkpoint: Any, files: Any, budget: Any,
        workload: Workload, options: Options, machine: Machine | None = None, plan: Plan | None = None,
        choose: PlanChoice = plan_block,
    ) -> None:
        rank, ranks = join_ranks(HOST.name if machine is None else machine.device_kind)
        alike = (share.mesh, checkpoint.fingerprint, options.cache, options.activations,
                 options.prompt_lookup_num_tokens, plan is None)
        if len(set(from_all(alike))) > 1:
            raise PlanError("mesh: ranks were given different models, meshes or formats, or some a plan and others "
                            "none; give all the same")
        self.share = replace(share, rank=rank)
        if self.share.ranks != ranks:
            raise PlanError(f"mesh: {share.mesh} has {self.share.ranks} ranks, and {ranks} processes "
                            f"run; start as many with torchrun --nproc-per-node={self.share.ranks}")
        options = rank_options(share, options)
        refused = None
        try:
            sharded, parts = shard_captured(captured, self.share, read_switches())
            own = rank_files(captured, parts, files)
        except ValueError as error:  # ShardError, or packed groups that would be cut
            refused = str(error)
        require_all(from_all(refused))
        machine = beside_readers(machine or known_machine(checkpoint.folder), ranks_here(ranks))
        super().__init__(sharded, checkpoint, own, budget, workload, options, machine, plan, choose)

    def _graphs(self, workload: Workload, batching: BatchSchedule) -> StepGraphs:
        """Graphs of this part of the model, which no other part's plan suits."""
        return replace(super()._graphs(workload, batching),
                       fingerprint=f"{self.checkpoint.fingerprint} {self.share.name}")

    def giving(self, gives: Gives, embeds: bool = False) -> LanguageModel:
        """This model, whose steps give logits of one token. PlanError for others: they are for one device."""
        if (gives, embeds) != ("last", False):
            raise PlanError("mesh: steps that give something else than the logits of the last token (logits of all "
                            "tokens, prompt lookup by generate), or take embeddings, are for one device; leave mesh "
                            "out, or give prompt_lookup_num_tokens to wrap")
        return self

    # -- plans that go together

    def _plan_anew(self, workload: Workload, options: Options, choose: PlanChoice) -> tuple[Pipeline, Plan]:
        planner = RankPlanner(self.share, self._graphs, self.budget, options, self.machine, self.switches)
        try:
            return plan_together([planner], workload, choose, lambda said: from_all(said[0]))[0]
        except PlanError:
            raise  # on all ranks
        except BaseException as error:
            tell_others(error)
            raise

    def _prepare(self, workload: Workload, options: Options, choose: PlanChoice, plan: Plan | None = None) -> None:
        """As for one device; plans that are replayed must be those of ranks that were planned together."""
        if plan is None:
            super()._prepare(workload, options, choose)
            return
        said: Any = Steps.of(plan), plan.schedule.prefill_chunks
        try:
            super()._prepare(workload, options, choose, plan)
        except PlanError as error:
            said = str(error)
        except BaseException as error:
            tell_others(error)
            raise
        require_alike(from_all(said))

    @property
    def session(self) -> Session:
        """The running session, once it is known that all ranks' Programs exchange alike. How many tokens a step checks
        follows from predicted times: those of the slowest rank's steps, lest ranks take different ones."""
        if self._session is None:
            plan = self.plan
            require_same_exchanges(
                (f"step over {tokens} tokens", self._pipeline.program(plan, tokens))
                 for tokens in plan.schedule.step_sizes)
            said = plan.prediction
            one, *more = map(max, zip(*from_all((said.decode_time_s, *said.speculative_times_s)), strict=True))
            super().session.plan = replace(plan, prediction=replace(
                said, decode_time_s=one, speculative_times_s=tuple(more)))
        return super().session

    # -- all ranks do the same

    def generate(self, inputs: Any = None, generation_config: Any = None, **options: Any) -> Any:
        """As `LanguageModel.generate`, called alike on every rank: draws are those of rank 0's random state. PlanError
        for a model that is to draft, which each rank would run by itself."""
        self._turns.refuse_within("generate")  # before ranks meet: not all need to have the callback
        listening = ("on_token", "streamer")  # not all ranks need to
        self._alike("generate", inputs, generation_config, {k: v for k, v in options.items() if k not in listening})
        if options.get("assistant_model") is not None:
            raise PlanError("assistant_model: a model on several ranks has none; leave assistant_model or mesh out")
        state = from_all(torch.random.get_rng_state() if self.share.rank == 0 else None)[0]
        if options.get("generator") is None and state is not None:
            torch.random.set_rng_state(state)
        return self._told(lambda: super(ShardedModel, self).generate(inputs, generation_config, **options))

    def answer_all(self, asked: Sequence[Request], *args: Any, **kwargs: Any) -> Any:
        """As `LanguageModel.answer_all`, with the same prompts on every rank."""
        self._turns.refuse_within("answer_all")
        self._alike("answer_all", [(each.ids, each.new_tokens, each.sampling) for each in asked], args)
        return self._told(lambda: super(ShardedModel, self).answer_all(asked, *args, **kwargs))

    def _reserve(self, batch: int, prompt: int, new_tokens: int, in_places: bool) -> None:
        """As `LanguageModel.reserve`; behind it others wait for a rank that fails."""
        super()._reserve(batch, prompt, new_tokens, in_places)
        self._awaited = True

    def _told(self, run: Callable[[], Any]) -> Any:
        """What `run` gives; where it fails, the other ranks are told by what. Not of arguments that are wrong, or for
        which there is no plan: all refuse those alike, before any step, and can go on."""
        self._awaited = False
        try:
            return run()
        except BaseException as error:
            if self._awaited or not isinstance(error, ValueError) or isinstance(error, CheckpointError):
                tell_others(error)
            raise

    def _alike(self, what: str, *given: Any) -> None:
        """ValueError, on all ranks, unless all are given the same. Where one has closed its session, all do: they make
        the next one together."""
        digest = hashlib.sha256(_plain(given).encode()).hexdigest()
        said = from_all((digest, self._session is None))
        if len({each for each, _ in said}) > 1:
            raise ValueError(f"{what}: ranks were given different arguments; give all the same, as torchrun does")
        if any(closed for _, closed in said):
            self._end_sessions()
        LOG.debug("rank %d of %s: %s", self.share.rank, self.share.name, what)


def _plain(value: Any) -> str:
    """Arguments as text, tensors and states of generators by their numbers; of other objects what they are."""
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if hasattr(value, "tolist"):  # of torch or numpy
        return f"{tuple(value.shape)} {value.tolist()}"
    if isinstance(value, list | tuple):
        return "[" + " ".join(map(_plain, value)) + "]"
    if isinstance(value, set | frozenset):
        return _plain(sorted(map(_plain, value)))
    value = value.to_dict() if hasattr(value, "to_dict") else value
    if hasattr(value, "items"):
        return " ".join(f"{key}={_plain(v)}" for key, v in sorted(value.items()))
    return repr(value) if isinstance(value, int | float | str | Sampling | None) else type(value).__qualname__
