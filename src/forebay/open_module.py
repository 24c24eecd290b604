"""From a model in memory to a captured model and a spill file of its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from forebay.huggingface.peft_model import PeftParts, peft_parts
from forebay.rewriter.capture.language_model import capture_model, tied_config
from forebay.rewriter.checkpoints.checkpoint import Checkpoint
from forebay.rewriter.checkpoints.lora_tensors import lora_tensors
from forebay.rewriter.checkpoints.match_weights import file_slices, weight_records
from forebay.rewriter.checkpoints.module_weights import spill_module, spill_tensors
from forebay.rewriter.checkpoints.records import AddedTensors
from forebay.rewriter.checkpoints.text_model import text_module, text_names
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.program import FileSlice


class OpenedModule(NamedTuple):
    """A model in memory, its weights in a spill file.

    Attributes:
        opened: What `open_model` gives of a folder.
        capture: Captures it with steps that give or take something else.
    """

    opened: tuple[CapturedModel, Checkpoint, dict[str, FileSlice]]
    capture: Callable[..., CapturedModel]


def open_module(model: torch.nn.Module, folder: str | Path) -> OpenedModule:
    """Capture a transformers causal LM, or a PeftModel of one, and write its weights to a spill file in `folder`."""
    parts = peft_parts(model)
    if parts is not None:
        return _open_peft(parts, folder)
    given = text_module(model)
    captured = capture_model(given)
    capture = partial(capture_model, tied_config(given), dtype=captured.dtype, architecture=type(given))
    checkpoint = spill_module(model, folder)
    names = () if given is model else text_names(cast(Any, model).config, "model", str)
    return OpenedModule((captured, checkpoint, file_slices(weight_records(captured, checkpoint, *names))), capture)


def _open_peft(parts: PeftParts, folder: str | Path) -> OpenedModule:
    base = spill_tensors(parts.tensors, folder)
    added = spill_tensors({each.name: each.read() for each in lora_tensors(parts.adapter, base, parts.base.config)},
                          folder)
    checkpoint = replace(base, added=AddedTensors(added.tensors), backing=(base.backing, added.backing))
    sizes: Counter[torch.dtype] = Counter()
    for tensor in parts.tensors.values():
        sizes[tensor.dtype] += tensor.nbytes if tensor.is_floating_point() else 0
    capture = partial(capture_model, tied_config(parts.base), dtype=sizes.most_common(1)[0][0],
                      architecture=type(parts.base), added=checkpoint.added)
    captured = capture()
    return OpenedModule((captured, checkpoint, file_slices(weight_records(captured, checkpoint))), capture)
