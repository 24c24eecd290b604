"""`wrap`: a language model larger than its budget, with Hugging Face's `generate`."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from forebay.build_model import build_model
from forebay.calibration import ranges_for
from forebay.huggingface.emptied import empty_module
from forebay.huggingface.nn_module_compat import refuse_options
from forebay.language_model import LanguageModel
from forebay.open_model import open_model
from forebay.read_mesh import MeshShape
from forebay.rewriter.capture.language_model import capture_model, tied_config
from forebay.rewriter.checkpoints.match_weights import file_slices, weight_records
from forebay.rewriter.checkpoints.module_weights import spill_module
from forebay.rewriter.ir.byte_sizes import parse_budget
from forebay.rewriter.ir.plan import Budget, Plan, Workload
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.plan_places import entering_at_once
from forebay.rewriter.planning.options import Activations, Options, usual_lengths
from forebay.runtime.disk.spill_file import require_spill_folder

if TYPE_CHECKING:

    pass



def wrap(
    model: str | os.PathLike[str] | torch.nn.Module,
    budget: Budget | int | str | dict[str, Any],
    *,
    batch: int = 1, prompt: int | None = None, new_tokens: int = 128, usual: tuple[int, int] | None = None,
    machine: Machine | None = None, plan: Plan | None = None, slots: int | None = None, slot_nbytes: int | None = None,
    lead: int | None = None, prefill_chunk: int | None = None, cache: str = "native",
    activations: Activations = "native", micro_batches: int | None = None, order: Literal["row", "zigzag"] = "zigzag",
    cache_tier: Literal["device", "host", "disk"] | None = None, cache_shares: tuple[float, float] | None = None,
    sparse_values: float = 1.0, cpu_attention: bool | None = None, checkpoints: tuple[int, int] | None = None,
    checkpoint_format: str = "native", hidden_tier: Literal["device", "host", "disk"] | None = None,
    hidden_shares: tuple[float, float] | None = None, places: int | None = None,
    prompt_lookup_num_tokens: int | Literal["auto"] | None = None, draft: str | Path | None = None,
    mesh: MeshShape | None = None, dequantize: bool = False, calibration: str | Path | None = None, **others: Any,
) -> LanguageModel:
    """Make `model` run within `budget`.

    `model`: a folder with a safetensors checkpoint, a .gguf file, "demo", or a transformers causal LM in memory, whose
    weights then move to a spill file in `budget["disk"]`. `budget`: bytes per tier, as ints or strings: {"device":
    "120MiB", "disk": "/path"}. `batch`, `prompt` (default 128, or half of the model's positions where they are few) and
    `new_tokens` are what the first plan is made for; `generate` plans anew for more. Where prompts and answers are
    mostly shorter, times are those of `usual` ones, (tokens, tokens). `machine` is what `forebay machine` kept, else a
    guess. `slots`, `slot_nbytes`, `lead` and `prefill_chunk` force the planner's choices. `cache` is the KV cache's
    format: native, kv8 or kv4. With bf16 or int8 `activations` packed weights meet them so rounded. What of the cache
    does not fit the device lies in host memory, as far as `budget["host"]` allows, and in a spill file in
    `budget["disk"]`, or all on a `cache_tier` but for `cache_shares` on the device and in host memory, where with
    `cpu_attention` the host attends. It is then computed in `micro_batches` parts that load their caches; in "zigzag"
    `order` they share each pass over the weights. With `checkpoints` (2, 3) it keeps of two of three stretches of
    tokens what K and V are made of, native or act8. With `sparse_values` 0.1 decode steps read a tenth of the values.
    Hidden states of a prefill wait on a `hidden_tier`, but for `hidden_shares`. With `places`, so many are computed at
    once, and prompts enter as others end. With `prompt_lookup_num_tokens` steps check up to so many tokens that
    followed the last ones before, with "auto" as many as pay. `draft`, a smaller model or a format ("w4": this one in 4
    bits; "auto": in 8 where they fit), guesses them in a part of the budget where that pays. Of a `mesh` (2, {"stages":
    2}) of processes of torchrun, which call this alike, each has a part and a budget. `plan` replays a plan. With
    `calibration` layers share a softmax maximum on a GPU.

    Raises PlanError for the budget, CheckpointError for files, SpillError for the disk folder, CaptureError for models.
    Long: most of it is the options, one by one.
    """
    refuse_options(others)
    require_spill_folder((sizes := parse_budget(budget)).disk)
    options = Options(
        slots=slots, slot_nbytes=slot_nbytes, lead=lead, prefill_chunk=prefill_chunk, cache=cache, order=order,
        micro_batches=micro_batches, cache_tier=cache_tier, cache_shares=cache_shares, cpu_attention=cpu_attention,
        checkpoints=checkpoints, checkpoint_format=checkpoint_format, entering=entering_at_once(places),
        prompt_lookup_num_tokens=prompt_lookup_num_tokens, activations=activations, sparse_values=sparse_values,
        hidden_tier=hidden_tier, hidden_shares=hidden_shares)
    if isinstance(model, torch.nn.Module):
        captured = capture_model(model)
        checkpoint = spill_module(model, sizes.disk or tempfile.gettempdir())
        files = file_slices(weight_records(captured, checkpoint))
    else:
        captured, checkpoint, files = open_model(model, dequantize=dequantize)
    prompt = prompt if prompt is not None else min(128, max(1, (captured.max_positions or 256) // 2))
    options = replace(options, sparse_values=sparse_values, hidden_tier=hidden_tier, hidden_shares=hidden_shares,
                     score_ranges=ranges_for(calibration, checkpoint.fingerprint, captured.dtype))
    workload = Workload(places or batch, prompt, new_tokens, *usual_lengths(usual))
    lm = build_model(draft, mesh, captured, checkpoint, files, sizes, workload, options, machine, plan)
    if isinstance(model, torch.nn.Module):  # only now: a budget that cannot work leaves the module as it was
        empty_module(model)
        given: Any = model
        lm.config, lm.generation_config = given.config, given.generation_config
        lm._capture = partial(capture_model, tied_config(given), dtype=captured.dtype, architecture=type(given))
    return lm
