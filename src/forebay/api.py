"""`wrap`: a language model larger than its budget, with Hugging Face's `generate`."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch

from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.capture.step_graphs import step_graphs
from forebay.rewriter.checkpoints.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from forebay.rewriter.checkpoints.config import read_config, read_eos
from forebay.rewriter.checkpoints.match_weights import checkpoint_names, weight_files, with_stored_formats
from forebay.rewriter.checkpoints.module_weights import spill_module
from forebay.rewriter.checkpoints.resolve import resolve_model
from forebay.rewriter.ir.byte_sizes import format_nbytes, parse_budget
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Workload
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline import Pipeline
from forebay.rewriter.planning.check_plan import check_plan
from forebay.rewriter.planning.planner import Wishes
from forebay.rewriter.report.explain import explain_plan
from forebay.rewriter.rewrite_captured import rewrite_captured
from forebay.rewriter.switches import read_switches
from forebay.runtime.devices.open_device import open_device
from forebay.runtime.measure.machine import kept_machine
from forebay.runtime.run.arena import return_freed_memory
from forebay.runtime.run.generation import Stop, generate_tokens, next_logits
from forebay.runtime.run.sampling import Sampling
from forebay.runtime.run.session import Session, resident_copies
from forebay.runtime.run.trace import Trace, write_trace

OnToken = Callable[[torch.Tensor], None]


def wrap(
    model: str | os.PathLike[str] | torch.nn.Module,
    budget: Budget | int | str | dict[str, Any],
    *,
    batch: int = 1,
    prompt: int | None = None,
    new_tokens: int = 128,
    machine: Machine | None = None,
    plan: Plan | None = None,
    slots: int | None = None,
    slot_nbytes: int | None = None,
    lead: int | None = None,
    prefill_chunk: int | None = None,
    cache: str = "native",
) -> LanguageModel:
    """Make `model` run within `budget`.

    `model`: a folder with a safetensors checkpoint, a .gguf file, "demo", or a transformers causal LM in memory, whose
    weights then move to a spill file in `budget["disk"]` (the module is empty afterwards). `budget`: bytes per tier,
    as ints or strings: {"device": "120MiB", "disk": "/path"}. `batch`, `prompt` (default 128, or half of the model's
    positions where they are few) and `new_tokens` are what the first plan is made for; `generate` plans anew for calls
    that need more. `machine` is what `forebay machine` measured; by default the profile it has kept, or else a cautious
    guess. `slots`, `slot_nbytes`, `lead` and `prefill_chunk` force choices that are otherwise the planner's. `cache` is
    the KV cache's format: native, kv8 or kv4 (rotated rows, groups along the head dimension). `plan` replays a saved
    plan.

    Raises PlanError for a budget that cannot work, CheckpointError for files that cannot be used, CaptureError for an
    architecture that is not supported.
    """
    sizes = parse_budget(budget)
    wishes = Wishes(slots, slot_nbytes, lead, prefill_chunk, cache_format=cache)
    if isinstance(model, torch.nn.Module):
        captured = capture_model(model)
        checkpoint = spill_module(model, sizes.disk or tempfile.gettempdir())
        files = weight_files(captured, checkpoint)
    else:
        captured, checkpoint, files = open_model(model)
    if prompt is None:
        prompt = min(128, max(1, captured.max_positions // 2)) if captured.max_positions else 128
    workload = Workload(batch, prompt, new_tokens)
    lm = LanguageModel(captured, checkpoint, files, sizes, workload, wishes, machine, plan)
    if isinstance(model, torch.nn.Module):  # only now: a budget that cannot work leaves the module as it was
        _empty(model)
        lm.eos = _eos_of(model)
    return lm


def open_model(
    model: str | os.PathLike[str], *, scores: bool = False
) -> tuple[CapturedModel, Checkpoint, dict[str, FileSlice]]:
    """Capture a model from its folder (or "demo", or a GGUF file) and find its weights, without reading any. With
    `scores` its steps give scores of given tokens instead of logits (`capture_model`)."""
    folder = resolve_model(model)
    checkpoint = open_checkpoint(folder)
    config = read_config(folder)
    captured = capture_model(config, dtype=_checkpoint_dtype(checkpoint), scores=scores)
    names = checkpoint_names(config)
    return with_stored_formats(captured, checkpoint, *names), checkpoint, weight_files(captured, checkpoint, *names)


def _eos_of(module: torch.nn.Module) -> tuple[int, ...]:
    eos = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def _empty(module: torch.nn.Module) -> None:
    """Give back the memory of a module's parameters and persistent buffers, whose values now lie on disk."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.new_empty(0)
    return_freed_memory()


def _checkpoint_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The floating dtype that most of the checkpoint's bytes have."""
    sizes: dict[torch.dtype, int] = {}
    for record in checkpoint.tensors.values():
        dtype = record.dtype if record.packed is None else record.packed.dtype
        if dtype.is_floating_point:
            sizes[dtype] = sizes.get(dtype, 0) + record.nbytes
    if not sizes:
        raise CheckpointError(f"{checkpoint.folder} holds no tensor of floating-point numbers: not a language model's")
    return max(sizes, key=lambda d: sizes[d])


class LanguageModel:
    """A captured model, its plan, and the session that runs it. Close it (or use `with`) to give memory back."""

    def __init__(
        self, captured: CapturedModel, checkpoint: Checkpoint, files: dict[str, FileSlice], budget: Budget,
        workload: Workload, wishes: Wishes, machine: Machine | None = None, plan: Plan | None = None,
    ) -> None:
        self.captured, self.checkpoint, self.budget, self.wishes = captured, checkpoint, budget, wishes
        self.machine = machine or kept_machine(checkpoint.folder) or Machine.default()
        self.switches = read_switches()
        self.files = files
        self.trace: Trace | None = None
        self._fused: CapturedModel | None = None  # the captured graphs after the block passes, whatever the workload
        self._session: Session | None = None
        self._lock = threading.RLock()  # one caller at a time has the arenas
        _check_choices(workload, wishes)
        if plan is not None and not budget.hold(plan.budget):
            raise PlanError(f"plan.budget: the plan may take {format_nbytes(plan.budget.device)} of device memory and "
                            f"{format_nbytes(plan.budget.host or 0)} of host memory, the run is given "
                            f"{format_nbytes(budget.device)} and {format_nbytes(budget.host or 0)}; plan again")
        if plan is not None and plan.fingerprint != checkpoint.fingerprint:
            raise PlanError(f"this plan was made for another model (fingerprint {plan.fingerprint}, this one is "
                            f"{checkpoint.fingerprint}); plan again")
        if plan is not None:
            self.wishes = replace(wishes, cache_format=plan.cache_format)
        self._prepare(plan.workload if plan else workload, plan)

    def _prepare(self, workload: Workload, plan: Plan | None = None) -> None:
        limit = self.captured.max_positions
        if limit and workload.context > limit:
            if workload.prompt + 1 > limit:
                raise PlanError(f"a prompt of {workload.prompt} tokens does not fit the model's {limit} positions")
            workload = replace(workload, new_tokens=limit - workload.prompt)
        fused = self._fused = self._fused or rewrite_captured(self.captured, self.switches, self.wishes.cache_format)
        source = step_graphs(fused, self.files, workload, self.checkpoint.fingerprint,
                              host_hop=self.machine.device_kind != "cpu")
        pipeline = Pipeline(source, workload, self.machine, self.switches)
        if plan is not None:
            check_plan(plan, pipeline.facts)
        else:
            plan = pipeline.plan(self.budget, self.wishes)
        self.close()  # only now: where there is no plan, the one before still serves
        self._pipeline, self.plan = pipeline, plan

    def explain(self) -> str:
        """The plan as text: what lives where, per layer, bytes per tier, predicted times."""
        return explain_plan(self.plan, self.captured)

    @cached_property
    def eos(self) -> tuple[int, ...]:
        """The token ids that end an answer, as the model's generation config has them."""
        return read_eos(self.checkpoint.folder)

    @property
    def session(self) -> Session:
        """The running session; made, and its resident weights loaded, when first asked for."""
        if self._session is None:
            device = open_device(self.machine, self.switches, self.trace)
            self._session = Session(
                self.plan, partial(self._pipeline.program, self.plan),  # without `self`: no cycle keeps the memory
                resident_copies(self.plan, self.files), self.captured.constants, device, self.trace,
                self._pipeline.growth(self.plan))
        return self._session

    @contextmanager
    def running(self, batch: int, prompt: int, new_tokens: int) -> Iterator[Session]:
        """The session, with a plan that serves so much (`reserve`), to run steps; other threads wait. An exception
        closes it, as a step that breaks off leaves copies under way that the next one does not expect."""
        with self._lock:
            self.reserve(batch, prompt, new_tokens)
            session = self.session
            try:
                yield session
            except BaseException:
                self.close()
                raise

    def reserve(self, batch: int, prompt: int, new_tokens: int) -> None:
        """Plan for (at least) this many sequences, prompt tokens and new tokens; nothing happens if the present plan
        serves them."""
        have = self.plan.workload
        fits = (batch <= have.batch and prompt <= have.prompt and prompt + new_tokens <= have.context)
        if not fits:
            self._prepare(Workload(max(1, batch), prompt, new_tokens))

    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        inputs: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        do_sample: bool = False,
        temperature: float | None = 1.0,
        top_k: int | None = 50,
        top_p: float | None = 1.0,
        eos_token_id: int | Sequence[int] | Literal["model"] | None = "model",
        pad_token_id: int | None = None,
        generator: torch.Generator | None = None,
        on_token: OnToken | None = None,
    ) -> torch.Tensor:
        """Continue the prompts, as transformers' `generate` does; returns [B, T + N] int64, prompts included.

        `input_ids` [B, T] with left padding where `attention_mask` [B, T] is 0. Greedy unless `do_sample`. Ends at
        `max_new_tokens` (default 20) or where every sequence has met one of `eos_token_id` (default: what the model's
        generation config names; None: run on); ended sequences are filled with `pad_token_id` (default: the first eos).
        Calls from several threads take turns. Raises ValueError for arguments that do not fit together.
        """
        input_ids = inputs if input_ids is None else input_ids
        prompts = self._prompts(input_ids, attention_mask)
        assert input_ids is not None
        longest = max(p.numel() for p in prompts)
        if max_new_tokens is None:
            max_new_tokens = 20 if max_length is None else max_length - input_ids.shape[1]
            if max_new_tokens < 1:
                raise ValueError(f"generate: max_length {max_length} leaves no room for a new token behind a prompt of "
                                 f"{input_ids.shape[1]}")
        if max_new_tokens < 1:
            raise ValueError(f"generate: max_new_tokens must be at least 1, found {max_new_tokens}")
        limit = self.captured.max_positions
        if limit and longest + max_new_tokens > limit:
            raise ValueError(f"generate: {longest} prompt tokens and {max_new_tokens} new ones exceed the model's "
                             f"{limit} positions")
        if eos_token_id == "model":
            eos_token_id = self.eos
        eos = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else [*eos_token_id]
        pad = pad_token_id if pad_token_id is not None else eos[0] if eos else 0
        sampling = Sampling(do_sample, 1.0 if temperature is None else temperature, top_k or 0,
                            1.0 if top_p is None else top_p)
        with self.running(len(prompts), longest, max_new_tokens) as session:
            new = generate_tokens(session, prompts, sampling, Stop(max_new_tokens, frozenset(eos), pad), generator,
                                  on_token)
        return torch.cat((input_ids.to(torch.int64).cpu(), new), 1)

    def next_logits(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [B, V] of the token after each prompt; prompts as for `generate`."""
        prompts = self._prompts(input_ids, attention_mask)
        with self.running(len(prompts), max(p.numel() for p in prompts), 1) as session:
            return next_logits(session, prompts).cpu()

    def _prompts(self, input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None) -> list[torch.Tensor]:
        if input_ids is None or input_ids.dim() != 2 or input_ids.numel() == 0:
            raise ValueError("input_ids must be a tensor [B, T] with at least one token")
        if input_ids.is_floating_point():
            raise ValueError(f"input_ids must be whole numbers, found {input_ids.dtype}")
        if input_ids.min() < 0 or input_ids.max() >= self.captured.vocab_size:
            raise ValueError(f"input_ids must lie in [0, {self.captured.vocab_size})")
        return _unpad(input_ids, attention_mask)

    def start_trace(self) -> None:
        """Record every launch, wait and copy from here on (slower by a few microseconds each)."""
        self.close()
        self.trace = Trace()

    def save_trace(self, path: str | Path) -> None:
        """Write what was recorded, beside the predicted decode step, for ui.perfetto.dev."""
        if self.trace is None:
            raise RuntimeError("save_trace: call start_trace before generate")
        from forebay.rewriter.predict.simulate import simulate

        planned = simulate(self._pipeline.program(self.plan, 1), self.machine)
        write_trace(path, self.trace.spans, planned.spans)

    def close(self) -> None:
        """Give back memory; the next `generate` takes it again."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def __enter__(self) -> LanguageModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_choices(workload: Workload, wishes: Wishes) -> None:
    chosen = {"batch": workload.batch, "prompt": workload.prompt, "new_tokens": workload.new_tokens,
              "slots": wishes.slots, "lead": wishes.lead, "prefill_chunk": wishes.prefill_chunk}
    for name, value in chosen.items():
        if value is not None and value < 1:
            raise PlanError(f"{name} must be at least 1, found {value}")
    if wishes.lead and wishes.slots and wishes.lead > wishes.slots:
        raise PlanError(f"lead {wishes.lead} needs as many slots; {wishes.slots} were asked for")


def _unpad(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Each row's real tokens; only left padding is accepted."""
    ids = input_ids.to(torch.int64).cpu()
    if attention_mask is None:
        return list(ids)
    mask = attention_mask.cpu().bool()
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask has shape {list(mask.shape)}, input_ids {list(ids.shape)}")
    prompts = []
    for i, (row, keep) in enumerate(zip(ids, mask, strict=True)):
        count = int(keep.sum())
        if count == 0:
            raise ValueError(f"row {i} has no token; attention_mask is all 0")
        if not bool(keep[-count:].all()):
            raise ValueError(f"row {i} is not left-padded; pad on the left (padding_side='left')")
        prompts.append(row[-count:])
    return prompts
