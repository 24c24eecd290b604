"""A model's folder as a module of transformers whose layers are streamed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from forebay.modules.streamed_module import StreamedModule, missing_weights, stored_records
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
    for name in UNUSED:  # without weights it would give random numbers
        if any(each.startswith(f"{name}.") for each in missing_weights(module, records)):
            setattr(module, name, None)
    constants = _constants(module, missing_weights(module, records))
    if missing := missing_weights(module, records.keys() | constants.keys()):
        raise CheckpointError(f"{folder} has no {missing[0]}, nor {len(missing) - 1} other weights of "
                              f"{type(module).__name__}: give the folder that the model was published in")
    return StreamedModule(module, records, dtype, constants=constants)


@one_thread
def _constants(module: Any, missing: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the missing weights that transformers computes, such as positions of sines: filling twice over other
    contents shows which."""
    found: dict[str, torch.Tensor] = {}
    for name in missing:
        owner, attribute = module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        held = owner._parameters.get(attribute)
        if held is None:
            continue
        filled = []
        for content in (0, 1):
            owner._parameters[attribute] = torch.nn.Parameter(torch.full(held.shape, content, dtype=held.dtype), False)
            torch.manual_seed(content)
            module._init_weights(owner)
            filled.append(owner._parameters[attribute].detach())
        owner._parameters[attribute] = held
        if torch.equal(*filled):
            found[name] = filled[0]
    return found


@one_thread
def _blank(config: Any, auto: str, dtype: torch.dtype) -> Any:
    """The model of a config on the meta device, with its constants."""
    import transformers
    from transformers import initialization

    config = copy.deepcopy(config)
    config.use_cache = auto != "AutoModel" and getattr(config, "use_cache", True)
    try:
        with torch.device("meta"), initialization.no_init_weights():
            module: Any = getattr(transformers, auto).from_config(config, dtype=dtype)
            module.tie_weights()
    except ValueError as error:  # a kind that has no such class
        raise CheckpointError(f"models of type {config.model_type!r} are not supported") from error
    fill_constants(module)
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
