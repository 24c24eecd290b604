"""A captured model, its plan and the session that runs it, with Hugging Face's `generate`."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from forebay.call_turns import CallTurns, ModelCall, TakesTurns
from forebay.drafting import drafting_per_slot
from forebay.huggingface.nn_module_compat import NnModuleCompat
from forebay.images.open_tower import image_chunk, image_options, open_tower
from forebay.model_planner import KindPlanner, ModelPlanner, PlannedSteps, PlannerOf
from forebay.open_model import capture_folder, known_machine
from forebay.rewriter.checkpoints.checkpoint import Checkpoint
from forebay.rewriter.checkpoints.config import read_config, read_generation_config
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.garbage import collect_when_due
from forebay.rewriter.ir.byte_sizes import format_nbytes
from forebay.rewriter.ir.graph import CapturedModel, Gives
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Workload
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.ir.shared_draft import DraftRecord, SharedDraft
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.one_thread import one_thread
from forebay.rewriter.pipeline.plan_search import plan_answers, plan_batch
from forebay.rewriter.pipeline.plan_task import PlanChoice
from forebay.rewriter.planning.check_plan import require_within
from forebay.rewriter.planning.options import Options, check_choices
from forebay.rewriter.planning.other_kinds import carried
from forebay.rewriter.report.explain import explain_plan
from forebay.rewriter.report.explain_shared import explain_shared
from forebay.rewriter.switches import read_switches
from forebay.runtime.devices.open_device import open_device
from forebay.runtime.run.prefill import require_whole_chunks
from forebay.runtime.run.prefix_reuse import reuse_prefixes
from forebay.runtime.run.progress import WorkDone
from forebay.runtime.run.request import Request
from forebay.runtime.run.room import with_rope_switch
from forebay.runtime.run.rows import SequenceRows
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.scheduler import OnEnd, OnStep, answer_all
from forebay.runtime.run.session import Session, resident_copies
from forebay.scoring_calls import ScoringCalls
from forebay.session_calls import SessionCalls, kept_prompts
from forebay.step_model import OnToken
from forebay.step_runner import StepRunner
from forebay.trace_calls import TraceCalls

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig

    from forebay.huggingface.causal_lm import StreamedCausalLM
    from forebay.images.modalities import Modality, TowerFeatures
    from forebay.images.tower import ImageTower

LOG = logging.getLogger("forebay")  # quiet unless the program that uses it, or `forebay -v`, listens


@cache
@one_thread
def causal_lm_class() -> type[StreamedCausalLM]:
    """The class that answers like transformers' models; loaded on first use."""
    from forebay.huggingface.causal_lm import StreamedCausalLM

    return StreamedCausalLM


class LanguageModel(SessionCalls, TakesTurns, ScoringCalls, TraceCalls, NnModuleCompat):
    """A captured model, its plan, and the session that runs it. Close it (or use `with`) to give memory back."""

    helper: LanguageModel | None  # drafts within the same budget
    shared_draft: SharedDraft | None  # or a step of its own does, in its memory
    drafts_seen: DraftRecord | None = None  # of what it drafts for the model that has it as its helper

    def __init__(
        self, captured: CapturedModel, checkpoint: Checkpoint, files: dict[str, FileSlice], budget: Budget,
        workload: Workload, options: Options, machine: Machine | None = None, plan: Plan | None = None,
        choose: PlanChoice = plan_batch, *, planner_of: PlannerOf = ModelPlanner, runner: StepRunner | None = None,
        capture: Callable[..., CapturedModel] | None = None,
    ) -> None:
        """Plan a model.

        Args:
            captured: Its graphs.
            checkpoint: Its files.
            files: The place of each weight within them.
            budget: Bytes per tier.
            workload: The sizes of the first plan.
            options: What is asked of plans.
            machine: The speeds that plans go by; the kept profile of this machine, or a guess, by default.
            plan: A plan to replay.
            choose: What makes the first plan.
            planner_of: What makes the provider of plans.
            runner: What the calls go through.
            capture: What captures the model with steps that give something else; from its folder by default.
        """
        # Where one is let go unclosed, what is due is looked for then, not while the next one is made.
        weakref.finalize(self, collect_when_due).atexit = False
        self.captured, self.checkpoint, self.budget = captured, checkpoint, budget
        self.machine = machine or known_machine(checkpoint.folder)
        self.files, self.switches, self.runner = files, read_switches(), runner or StepRunner()
        self.tally = WorkDone()  # of the last `generate`
        self._session: Session | None = None
        self._turns = CallTurns()  # for the arenas
        self._held: SequenceRows | None = None  # whose tokens the cache holds between calls
        self._variants: dict[tuple[Gives, bool], LanguageModel] = {}  # the same model with steps of other kinds
        self._origin: weakref.ref[LanguageModel] | None = None  # of a variant; weak, for a cycle would keep the memory
        self._capture = capture or partial(capture_folder, checkpoint.folder)
        self.prefixes = kept_prompts(options)
        self.planner = planner_of(captured, checkpoint, files, budget, self.machine)
        check_choices(workload, options, plan)
        if plan is not None:
            require_within(plan, budget)
        self.options = options if plan is None else options.as_planned(plan)
        self._adopt(self.planner.planned(workload, options, choose) if plan is None else (
            self.planner.replayed(plan, self.options)))

    def _adopt(self, steps: PlannedSteps) -> None:
        if "steps" in vars(self):  # only now: where there is no plan, the one before still serves
            self._end_sessions()
        if not self.captured.rewindable:
            require_whole_chunks(steps.plan)
        self.steps, self.plan = steps, steps.plan
        self.helper, self.shared_draft = steps.helper, steps.shared_draft
        plan, work = steps.plan, steps.plan.workload
        nbytes = plan.budget.device, plan.nbytes_on("device"), plan.prediction.streamed_nbytes
        LOG.info("planned %d of %d + %d tokens within %s: %s of weights stay, %s stream in each step", work.batch,
                 work.prompt, work.new_tokens, *map(format_nbytes, nbytes))

    def explain(self) -> str:
        """The plan as text: what lives where, per layer, bytes per tier, predicted times; and what drafts, and why."""
        drafts = [] if self.steps.drafts is None else [f"draft       {self.draft_summary}"]
        if self.helper is not None:
            drafts.append(f"The plan of the draft:\n\n{self.helper.explain()}")
        if self.shared_draft is not None:
            drafts.append(explain_shared(self.shared_draft.plan, self.plan))
        with suppress(ValueError, CheckpointError):  # of a model, or a folder, that has no tower
            drafts.append(f"images      {self.tower.summary}")
        return "\n\n".join([explain_plan(self.plan, self.captured), *drafts])

    @property
    def draft_summary(self) -> str:
        """The draft and why it was chosen, or why there is none."""
        return "none was given" if self.steps.drafts is None else str(self.steps.drafts)

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The model's config, as transformers reads it."""
        return read_config(self.checkpoint.folder)

    @cached_property
    def generation_config(self) -> GenerationConfig:
        """Defaults of `generate`: the folder's own."""
        return read_generation_config(self.checkpoint.folder)

    def __repr__(self) -> str:
        plan, stays = self.plan, sum(w.nbytes for w in self.plan.weights if w.tier == "device")
        state = "not loaded" if self._session is None else "loaded"
        return (f"LanguageModel({self.captured.model_type}, {len(self.captured.layers)} layers, {str(self.dtype)[6:]}, "
                f"{format_nbytes(self.captured.weight_nbytes)} of weights, {format_nbytes(stays)} of them resident; "
                f"budget {format_nbytes(plan.budget.device)}, planned for {plan.workload.batch} of "
                f"{plan.workload.prompt} + {plan.workload.new_tokens} tokens, {state})")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the model computes."""
        return self.captured.dtype

    @property
    def loaded(self) -> bool:
        """Whether the session runs."""
        return self._session is not None

    @property
    def session(self) -> Session:
        """The running session, made when first asked for; its first step reads the resident weights."""
        if self._session is None:
            if self.helper is not None:
                _ = self.helper.session
            began, plan, captured = time.monotonic(), self.plan, self.captured
            agreed = self.runner.agreed(self.steps)
            folder = self.budget.disk if isinstance(self.budget, Budget) else None  # limits alone name none
            device = open_device(self.machine, self.switches, self.trace, folder)
            self._session = Session(
                agreed, partial(self.steps.pipeline.program, plan),  # without `self`: no cycle keeps the memory
                resident_copies(plan, self.files), captured.constants, device, self.trace,
                self.steps.pipeline.growth(plan), captured.gives == "all", captured.rope_switch_length,
                self.shared_draft, captured.rewindable, captured.adapters)
            if self.prefixes is not None:
                self.prefixes.open()
                reuse_prefixes(self._session, captured.states, self.prefixes, self.prefix_identity.digest())
            LOG.info("took memory in %.1f s; the first step loads %d bytes of weights", time.monotonic() - began,
                     plan.nbytes_on("device"))
        return self._session

    def giving(self, gives: Gives, embeds: bool = False) -> LanguageModel:
        """This model with steps that give something else, or take embeddings too (`capture_model`), under the same
        budget: only one of them has memory at a time."""
        kind = gives, embeds
        if kind == (self.captured.gives, bool(self.captured.embeds)):
            return self
        with self._turns.lock:
            if kind not in self._variants:
                captured, options = self._capture(gives=gives, embeds=embeds), carried(self.options)
                if captured.image_groups:
                    options = image_options(options, captured, image_chunk(self.config, self.plan.workload.prompt))
                other = LanguageModel(captured, self.checkpoint, self.files, self.budget, self.plan.workload, options,
                                      self.machine, planner_of=KindPlanner, capture=self._capture)
                other._turns, other._origin = self._turns, weakref.ref(self)
                other.config, other.generation_config = self.config, self.generation_config
                self._variants[kind] = other
            return self._variants[kind]

    @cached_property
    def tower(self) -> ImageTower:
        """The vision tower; ValueError for a model that takes no images."""
        origin = None if self._origin is None else self._origin()
        return origin.tower if origin is not None else open_tower(
            self.config, self.checkpoint, self.captured, self.options, self.machine.kind)

    def image_features(
        self, given: Mapping[str, torch.Tensor], call: ModelCall
    ) -> dict[Modality, TowerFeatures]:
        """`ImageTower.features` within the budget, whose memory is the tower's meanwhile."""
        with self.turn(call):
            self._end_sessions()
            self.check_files()
            return self.tower.features(given, self.plan.budget.device)

    def _family(self) -> list[LanguageModel]:
        """The model and all that share its budget."""
        origin = self if self._origin is None else self._origin() or self
        return [origin, *origin._variants.values()]

    @contextmanager
    def running(
        self, batch: int, prompt: int, new_tokens: int, continuous: bool = False, *, call: ModelCall | None = None
    ) -> Iterator[Session]:
        """The session, with a plan that serves so much (`reserve`), to run steps of `call` (`turn`). An exception
        closes it, as a step that breaks off leaves copies under way that the next one does not expect. Raises
        CheckpointError, at the end too, if the weights' files are no longer those that were opened."""
        with self.turn(call or ModelCall("running")):
            for other in self._family():
                if other is not self:
                    other._end_session()
            self._reserve(batch, prompt, new_tokens, continuous)
            self.check_files()
            session, self._held = self.session, None
            try:
                yield session
                self.check_files()
            except BaseException:
                self._end_sessions()
                raise

    def hold(self, rows: SequenceRows) -> None:
        """Let `resuming` go on with these rows until the session is used for others."""
        self._held = rows

    def holds(self, rows: SequenceRows) -> bool:
        """Return whether `resuming` can go on with these rows."""
        return self._held is rows and self._session is rows.session

    @contextmanager
    def resuming(self, rows: SequenceRows, call: ModelCall) -> Iterator[None]:
        """The session that holds `rows`, to run further steps of `call` (`turn`); RuntimeError if it has been used for
        others since."""
        with self.turn(call):
            if not self.holds(rows):
                raise RuntimeError("this cache was given up when the model was used for something else; begin again "
                                   "with the whole prompt")
            self.check_files()
            try:
                yield
                self.check_files()
            except BaseException:
                self._end_sessions()
                raise

    def check_files(self) -> None:
        """Raise CheckpointError if a file of the weights was changed or replaced since the model was opened: what was
        computed so far may come from both. A few microseconds per file."""
        for checkpoint in (self.checkpoint, *self.steps.more_files):
            checkpoint.require_unchanged()

    def reserve(
        self, batch: int, prompt: int, new_tokens: int, continuous: bool = False, *, call: ModelCall | None = None
    ) -> None:
        """Plan for (at least) this many sequences, prompt tokens and new tokens; nothing happens if the present plan
        serves them. `continuous` needs a plan with continuous batching. Where no plan checks the requested number of
        drafted tokens, one without drafts is made."""
        with self.turn(call or ModelCall("reserve")):
            self._reserve(batch, prompt, new_tokens, continuous)

    def _reserve(self, batch: int, prompt: int, new_tokens: int, continuous: bool) -> None:
        if (drafts := self.steps.drafts) and drafts.outdated and (
                not isinstance(self.options.prompt_lookup_num_tokens, int)):
            LOG.info("of drafted tokens %.0f %% stood, which is too few: planning without a draft",
                     100 * drafts.seen.chance)
            self._adopt(self.planner.planned(self.plan.workload, self.options, plan_batch))
        have, switch = self.plan.workload, self.captured.rope_switch_length
        prompt, new_tokens = with_rope_switch(prompt, new_tokens, switch)
        held = continuous if self.plan.schedule.batching.admitted else batch <= have.batch
        if not (held and prompt <= have.prompt and prompt + new_tokens <= have.context):
            LOG.info("planning anew for %d of %d + %d tokens; the plan was for %d of %d + %d", batch, prompt,
                     new_tokens, have.batch, have.prompt, have.new_tokens)
            batch = have.batch if continuous and self.options.admitted else max(1, batch)
            options = self.options if continuous else replace(self.options, admitted=None)
            if self.captured.image_groups:
                options = image_options(options, self.captured, image_chunk(self.config, prompt))
            work, choose = have.of(batch, prompt, new_tokens), plan_answers if continuous else plan_batch
            try:
                self._adopt(self.planner.planned(work, options, choose))
            except PlanError as error:
                if not isinstance(options.prompt_lookup_num_tokens, int):
                    raise
                LOG.info("no step checks drafts of this call: %s", error)
                options = replace(options, prompt_lookup_num_tokens=None)
                self._adopt(self.planner.planned(work, options, choose))
        self.runner.reserved()

    def generate(
        self,
        inputs: Any = None,
        generation_config: GenerationConfig | None = None,
        *,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        on_token: OnToken | None = None,
        **options: Any,
    ) -> Any:
        """Continue the prompts, as transformers' `generate` does and with its arguments; returns [B, T + N] int64,
        prompts included, or what `return_dict_in_generate` asks for.

        `inputs` (or `input_ids`) [B, T]: a tensor, lists, or all that a tokenizer returns; without them the model's bos
        token begins. `attention_mask` [B, T] is 0 on padding, at either end of a row. Defaults
        come from `generation_config`, then from the model's own. `generator` replaces torch's global one; with one per
        prompt, draws do not depend on the batch. `on_token` sees each column [B] of tokens as it is chosen. Calls from
        several threads take turns. ValueError where arguments do not fit, and RuntimeError in a callback of another
        call.
        """
        with (self.runner.generating(self, inputs, generation_config, generator, options=options),
              self.turn(call := ModelCall("generate"))):
            return self._causal_lm(call).answer(inputs, generation_config, generator, on_token, options)

    def answer_all(
        self, asked: Sequence[Request], sampling: Sampling, eos: frozenset[int], *, on_end: OnEnd, on_step: OnStep
    ) -> WorkDone:
        """`runtime.run.scheduler.answer_all` on the plan there is, however many are asked."""
        with self.runner.answering(self, asked, sampling, eos):
            longest = max(each.ids.numel() for each in asked)
            most = max(each.ids.numel() + each.new_tokens for each in asked) - longest  # beside it in a place
            count, call = min(len(asked), self.plan.workload.batch), ModelCall("answer_all")
            with (self.running(count, longest, most, continuous=True, call=call) as session,
                  drafting_per_slot(self.helper, session) as drafter):
                return answer_all(session, asked, sampling, eos, on_end=on_end, on_step=on_step, drafter=drafter)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Logits at every position, and the loss of `labels`: see `StreamedCausalLM.forward`."""
        with self.turn(call := ModelCall("lm(…)")):
            return self._causal_lm(call)(*args, **kwargs)

    def _causal_lm(self, call: ModelCall) -> StreamedCausalLM:  # kept, it would be a cycle that keeps the memory
        return causal_lm_class()(self, call)

    def _end_sessions(self) -> None:
        for lm in self._family():
            lm._end_session()
        collect_when_due()

    def _end_session(self) -> None:
        if self.helper is not None:
            self.helper._end_session()
        session, self._session = self._session, None
        if session is not None:
            session.close()
