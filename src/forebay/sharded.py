"""A language model that several processes run together, each with its stage's layers or its part of every layer, its
plan and its budget."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from forebay.language_model import LOG, LanguageModel
from forebay.model_planner import ModelPlanner, PlannedSteps
from forebay.open_model import known_machine
from forebay.rewriter.checkpoints.checkpoint import Checkpoint
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Workload
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.ir.share import RankShare
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.plan_ranks import (
    RankPlanner,
    Steps,
    plan_together,
    rank_options,
    require_alike,
    require_all,
)
from forebay.rewriter.pipeline.plan_task import PlanChoice
from forebay.rewriter.pipeline.shard_captured import rank_files, shard_captured
from forebay.rewriter.planning.options import Options
from forebay.rewriter.predict.ranks import beside_readers
from forebay.rewriter.switches import read_switches
from forebay.runtime.comm.launched import ranks_here
from forebay.runtime.comm.ranks import from_all, join_ranks, require_same_exchanges, tell_others
from forebay.runtime.devices.kinds import HOST
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling
from forebay.step_model import StepModel
from forebay.step_runner import StepRunner


def shard_model(
    share: RankShare, captured: CapturedModel, checkpoint: Checkpoint, files: dict[str, FileSlice], budget: Budget,
    workload: Workload, options: Options, machine: Machine | None, plan: Plan | None, choose: PlanChoice,
) -> LanguageModel:
    """One rank's part of a model. All ranks call the same methods with the same arguments, as under torchrun; each gets
    the whole answer."""
    rank, ranks = join_ranks(HOST.name if machine is None else machine.device_kind)
    alike = (share.mesh, checkpoint.fingerprint, options.cache, options.activations, options.prompt_lookup_num_tokens,
             plan is None)
    if len(set(from_all(alike))) > 1:
        raise PlanError("mesh: ranks were given different models, meshes or formats, or some a plan and others "
                        "none; give all the same")
    share = replace(share, rank=rank)
    if share.ranks != ranks:
        raise PlanError(f"mesh: {share.mesh} has {share.ranks} ranks, and {ranks} processes "
                        f"run; start as many with torchrun --nproc-per-node={share.ranks}")
    options = rank_options(share, options)
    refused = None
    try:
        sharded, parts = shard_captured(captured, share, read_switches())
        own = rank_files(captured, parts, files)
    except ValueError as error:  # ShardError, or packed groups that would be cut
        refused = str(error)
    require_all(from_all(refused))
    machine = beside_readers(machine or known_machine(checkpoint.folder), ranks_here(ranks))
    return LanguageModel(sharded, checkpoint, own, budget, workload, options, machine, plan, choose,
                         planner_of=partial(MeshPlanner, share), runner=MeshRunner(share), capture=_refuse_capture)


def _refuse_capture(**kind: Any) -> CapturedModel:
    raise PlanError("mesh: logits of all tokens, prompt lookup by generate, and embeddings are for one device; leave "
                    "mesh out, or give prompt_lookup_num_tokens to wrap")


class MeshPlanner:
    """Plans one rank's part of a model, together with the other ranks."""

    def __init__(self, share: RankShare, captured: CapturedModel, checkpoint: Checkpoint, files: dict[str, FileSlice],
                 budget: Budget, machine: Machine) -> None:
        self._share = share
        self._own = ModelPlanner(captured, checkpoint, files, budget, machine, share.name)  # no other part's plan suits

    def planned(self, workload: Workload, options: Options, choose: PlanChoice) -> PlannedSteps:
        planner = RankPlanner(self._share, self._own.task(self._own.fitted(workload), options))
        with _telling_others():
            return PlannedSteps(*plan_together([planner], choose, lambda said: from_all(said[0]))[0])

    def replayed(self, plan: Plan, options: Options) -> PlannedSteps:
        """Replay like for one device; replayed plans must come from ranks that were planned together."""
        said: Any = Steps.of(plan), plan.schedule.prefill_chunks
        steps = None
        try:
            with _telling_others():
                steps = self._own.replayed(plan, options)
        except PlanError as error:
            said = str(error)
        require_alike(from_all(said))
        assert steps is not None
        return steps


@contextmanager
def _telling_others() -> Iterator[None]:
    """Tell the other ranks by what this one fails, but for lack of a plan, which they learn as it is said."""
    try:
        yield
    except PlanError:
        raise
    except BaseException as error:
        tell_others(error)
        raise


class MeshRunner(StepRunner):
    """Runs the calls of one rank's part of a model: all ranks do the same."""

    def __init__(self, share: RankShare) -> None:
        self._share = share
        self._awaited = False  # whether other ranks may wait for this one's steps

    def agreed(self, steps: PlannedSteps) -> Plan:
        """The plan, once it is known that all ranks' Programs exchange alike. How many tokens a step checks follows
        from predicted times: those of the slowest rank's steps, lest ranks take different ones."""
        plan, said = steps.plan, steps.plan.prediction
        require_same_exchanges((f"step over {tokens} tokens", steps.pipeline.program(plan, tokens))
                               for tokens in plan.schedule.step_sizes)
        one, *more = map(max, zip(*from_all((said.decode_time_s, *said.speculative_times_s)), strict=True))
        return replace(plan, prediction=replace(said, decode_time_s=one, speculative_times_s=tuple(more)))

    def reserved(self) -> None:
        """Note that from here on others wait for a rank that fails."""
        self._awaited = True

    @contextmanager
    def generating(self, lm: StepModel, *given: Any, options: dict[str, Any]) -> Iterator[None]:
        """Enter `generate`, called alike on every rank: draws are those of rank 0's random state. PlanError for a model
        that is to draft, which each rank would run by itself."""
        *_, generator = given
        heard = {name: value for name, value in options.items() if name != "streamer"}  # not all ranks need to listen
        with self._together(lm, "generate", *given, heard):
            if options.get("assistant_model") is not None:
                raise PlanError("assistant_model: a model on several ranks has none; leave assistant_model or mesh out")
            state = from_all(torch.random.get_rng_state() if self._share.rank == 0 else None)[0]
            if generator is None and state is not None:
                torch.random.set_rng_state(state)
            yield

    @contextmanager
    def answering(self, lm: StepModel, asked: Sequence[Request], *given: Any) -> Iterator[None]:
        """Enter `answer_all`, with the same prompts on every rank."""
        with self._together(lm, "answer_all", [(each.ids, each.new_tokens, each.sampling) for each in asked], given):
            yield

    @contextmanager
    def _together(self, lm: StepModel, name: str, *given: Any) -> Iterator[None]:
        """ValueError, on all ranks, unless all are given the same. Where one has closed its session, all do: they make
        the next one together. Where this rank then fails, the others are told by what. Not of arguments that are wrong,
        or for which there is no plan: all refuse those alike, before any step, and can go on."""
        lm.refuse_within(name)  # before ranks meet: not all need to have the callback
        digest = hashlib.sha256(_plain(given).encode()).hexdigest()
        said = from_all((digest, lm.loaded))
        if len({each for each, _ in said}) > 1:
            raise ValueError(f"{name}: ranks were given different arguments; give all the same, as torchrun does")
        if not all(loaded for _, loaded in said):
            lm.close()
        LOG.debug("rank %d of %s: %s", self._share.rank, self._share.name, name)
        self._awaited = False
        try:
            yield
        except BaseException as error:
            if self._awaited or not isinstance(error, ValueError) or isinstance(error, CheckpointError):
                tell_others(error)
            raise


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
