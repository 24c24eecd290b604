"""`wrap`: a language model larger than its budget, with Hugging Face's `generate`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from forebay.build_model import build_model
from forebay.default_budget import budget_or_default
from forebay.huggingface.emptied import empty_module
from forebay.language_model import LanguageModel
from forebay.modules.encoder_decoder import EncoderDecoder, is_encoder_decoder
from forebay.open_model import open_model
from forebay.option_keywords import with_keywords
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.plan import Budget, PlanError, Workload
from forebay.rewriter.planning.features.admission import admitted_at_once
from forebay.rewriter.planning.options import Options
from forebay.runtime.disk.spill_file import require_spill_folder


@with_keywords(Options)
def wrap(
    model: str | os.PathLike[str] | torch.nn.Module, budget: Budget | int | str | dict[str, Any] | None,
    options: Options,
) -> LanguageModel:
    """Make `model` run within `budget`: `wrap(model, budget=None, **options)`.

    Args:
        model: A folder with a safetensors checkpoint, a .gguf file, "demo", a name on the Hugging Face Hub, or a
            transformers causal LM in memory, or a PeftModel of one. Weights in memory move to a spill file in
            `budget["disk"]`. The folder of a LoRA adapter means its base with it.
        budget: Bytes per tier, as ints or strings: {"device": "120MiB", "host": "1GiB", "disk": "/path"}. What of the
            KV cache does not fit the device lies in host memory, as far as there is any, and in a spill file on disk.
            None: half of the free memory.
        options: What is asked of the plan, as a record; keywords come before it. Sizes are those of the first plan:
            `generate` plans anew for more. Of a `mesh` of processes, which call this alike, each has a budget.

    Returns:
        The model; of a folder with an encoder and a decoder (T5, BART, Marian, Whisper) an `EncoderDecoder`.

    Raises:
        PlanError: for an option, or a budget that cannot work.
        CheckpointError: for files; SpillError for the disk's folder; CaptureError for models.
    """
    require_spill_folder((sizes := budget_or_default(budget)).disk)
    if not isinstance(model, torch.nn.Module) and is_encoder_decoder(Path(model).expanduser()):
        if options != Options():
            raise PlanError("options: a model with an encoder and a decoder takes a budget alone; leave options out")
        return cast(Any, EncoderDecoder(model, sizes))
    capture = None
    if not isinstance(model, torch.nn.Module):
        opened = open_model(model, dequantize=options.dequantize, keep=options.of_one_model, adapter=options.adapter)
    elif options.adapter is not None:
        raise PlanError("adapter: it goes on top of a model's folder; give a PeftModel, or the folder")
    else:
        from forebay.open_module import open_module

        opened, capture = open_module(model, sizes.disk or tempfile.gettempdir())
    lm = plan_opened(opened, sizes, options, capture)
    if isinstance(model, torch.nn.Module):  # only now: a budget that cannot work leaves the module as it was
        empty_module(model)
        lm.config, lm.generation_config = cast(Any, model).config, cast(Any, model).generation_config
    return lm


def plan_opened(
    opened: tuple[Any, Any, Any], sizes: Budget, options: Options, capture: Callable[..., CapturedModel] | None = None
) -> LanguageModel:
    """Plan an opened model for one batch, as `wrap` does."""
    options = replace(options, admitted=admitted_at_once(options.batch_slots))
    workload = Workload(options.batch_slots or options.batch or 1,
                        options.prompt or min(128, max(1, (opened[0].max_positions or 256) // 2)),
                        options.new_tokens or 128, *(options.typical or ()))
    return build_model(opened, sizes, workload, options, capture=capture)
