"""`wrap`: a language model larger than its budget, with Hugging Face's `generate`."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from forebay.build_model import build_model
from forebay.default_budget import budget_or_default
from forebay.huggingface.emptied import empty_module
from forebay.language_model import LanguageModel
from forebay.open_model import open_model
from forebay.option_keywords import with_keywords
from forebay.rewriter.capture.language_model import capture_model, tied_config
from forebay.rewriter.checkpoints.match_weights import file_slices, weight_records
from forebay.rewriter.checkpoints.module_weights import spill_module
from forebay.rewriter.checkpoints.text_model import text_module, text_names
from forebay.rewriter.ir.plan import Budget, Workload
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
            transformers causal LM in memory. The weights of the last move to a spill file in `budget["disk"]`.
        budget: Bytes per tier, as ints or strings: {"device": "120MiB", "host": "1GiB", "disk": "/path"}. What of the
            KV cache does not fit the device lies in host memory, as far as there is any, and in a spill file on disk.
            None: half of the free memory.
        options: What is asked of the plan, as a record; keywords come before it. Sizes are those of the first plan:
            `generate` plans anew for more. Of a `mesh` of processes, which call this alike, each has a budget.

    Raises:
        PlanError: for an option, or a budget that cannot work.
        CheckpointError: for files; SpillError for the disk's folder; CaptureError for models.
    """
    require_spill_folder((sizes := budget_or_default(budget)).disk)
    capture, given = None, cast(Any, model)
    if isinstance(model, torch.nn.Module):
        given = text_module(model)
        captured = capture_model(given)
        capture = partial(capture_model, tied_config(given), dtype=captured.dtype, architecture=type(given))
        checkpoint = spill_module(model, sizes.disk or tempfile.gettempdir())
        config = cast(Any, model).config
        names = () if given is model else text_names(config, "model", str)
        files = file_slices(weight_records(captured, checkpoint, *names))
    else:
        captured, checkpoint, files = open_model(model, dequantize=options.dequantize,
                                                 keep=options.of_one_model)
    options = replace(options, admitted=admitted_at_once(options.batch_slots))
    workload = Workload(options.batch_slots or options.batch or 1,
                        options.prompt or min(128, max(1, (captured.max_positions or 256) // 2)),
                        options.new_tokens or 128, *(options.typical or ()))
    lm = build_model((captured, checkpoint, files), sizes, workload, options, capture=capture)
    if isinstance(model, torch.nn.Module):  # only now: a budget that cannot work leaves the module as it was
        empty_module(model)
        lm.config, lm.generation_config = cast(Any, model).config, cast(Any, model).generation_config
    return lm
