"""A model's folder as a module of transformers whose layers are streamed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forebay.modules.streamed_module import StreamedModule, stored_records
from forebay.rewriter.capture.language_model import fill_constants
from forebay.rewriter.checkpoints.checkpoint import Checkpoint
from forebay.rewriter.checkpoints.config import read_config
from forebay.rewriter.checkpoints.match_weights import checkpoint_names
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.one_thread import one_thread

UNUSED = ("pooler",)  # modules that a checkpoint may lack


def open_streamed(folder: Path, auto: str) -> StreamedModule:
    """Open a folder's model, without reading a weight.

    Args:
        folder: The model's folder.
        auto: transformers' class of the model's kind, such as "AutoModel".

    Raises:
        CheckpointError: The folder holds no such model, or lacks weights of it.
    """
    checkpoint = open_checkpoint(folder)
    config = read_config(folder, checkpoint.tensors)
    dtype = _dtype(checkpoint)
    module = _blank(config, auto, dtype)
    prefix, rename = checkpoint_names(config, type(module))
    records = stored_records(module, checkpoint, prefix, rename)
    streamed = StreamedModule(module, records, dtype)
    for name in UNUSED:  # without weights it would give random numbers
        if getattr(module, name, None) is not None and any(each.startswith(f"{name}.") for each in streamed.missing):
            setattr(module, name, None)
            streamed = StreamedModule(module, records, dtype)
    if missing := streamed.missing:
        raise CheckpointError(f"{folder} has no {missing[0]}, nor {len(missing) - 1} other weights of "
                              f"{type(module).__name__}: give the folder that the model was published in")
    return streamed


@one_thread
def _blank(config: Any, auto: str, dtype: torch.dtype) -> Any:
    """The model of a config on the meta device, with its constants."""
    import transformers
    from transformers import initialization

    config = copy.deepcopy(config)
    config.use_cache = auto != "AutoModel" and getattr(config, "use_cache", True)
    try:
        with torch.device("meta"), initialization.no_init_weights():
            module: nn.Module = getattr(transformers, auto).from_config(config, dtype=dtype)
    except ValueError as error:  # a kind that has no such class
        raise CheckpointError(f"a model of type {config.model_type!r} is no {auto} of transformers") from error
    fill_constants(module)  # type: ignore[arg-type]
    return module.eval()


def _dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The floating dtype that most bytes have."""
    sizes: dict[torch.dtype, int] = {}
    for record in checkpoint.tensors.values():
        if record.packed is None and record.dtype.is_floating_point:
            sizes[record.dtype] = sizes.get(record.dtype, 0) + record.nbytes
    if not sizes:
        raise CheckpointError(f"{checkpoint.folder} holds no floating-point weights that can be streamed; give the "
                              "folder that the model was published in")
    return max(sizes, key=lambda each: sizes[each])
