"""Tensors that a checkpoint stores in another float dtype than the model computes in: copies in the cache, made once.

Routers of many mixtures of experts are float32 in checkpoints of bfloat16, and decay rates of recurrent layers too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from forebay.rewriter.checkpoints.checkpoint import SINGLE, Checkpoint, read_header, read_tensor
from forebay.rewriter.checkpoints.identity import states_checksum
from forebay.rewriter.checkpoints.new_folder import new_folder
from forebay.rewriter.checkpoints.records import TensorRecord
from forebay.rewriter.checkpoints.resolve import made_once
from forebay.rewriter.checkpoints.stored_tensors import spellings
from forebay.rewriter.checkpoints.write_tensors import write_new_tensors
from forebay.rewriter.ir.graph import CapturedModel


def in_model_dtypes(
    captured: CapturedModel, checkpoint: Checkpoint, prefix: str = "", rename: Callable[[str], str] = str
) -> Checkpoint:
    """Return the checkpoint with tensors in the dtypes of the captured model, as transformers casts them.

    Tables of experts stay as they are stored: another dtype of theirs is refused.

    Args:
        captured: The model.
        checkpoint: Its tensors, in files.
        prefix: As for `weight_records`.
        rename: As for `weight_records`.
    """
    specs = {name: spec for spec in captured.weights.values() if spec.table is None
             for tied in (spec.name, *spec.ties) for name in spellings(tied, prefix)}
    wanted = {name: specs[today].dtype for name, record in checkpoint.tensors.items()
              if (today := rename(name)) in specs and _differs(record, specs[today].dtype)}
    if not wanted:
        return checkpoint
    shapes = {name: checkpoint.tensors[name].shape for name in wanted}
    identity = f"{checkpoint.folder.resolve()} {states_checksum(checkpoint.states)} {sorted(map(str, wanted.items()))}"

    def write(out: Path) -> None:
        with new_folder(out) as partial:
            write_new_tensors(partial / SINGLE, [(name, dtype, shapes[name]) for name, dtype in wanted.items()],
                              lambda name: read_tensor(checkpoint.tensors[name]).to(wanted[name]))

    path = made_once(checkpoint.folder, f"{checkpoint.folder.name}-cast", identity, write) / SINGLE
    return replace(checkpoint, tensors={**checkpoint.tensors, **read_header(path)})  # and the states of its own files


def _differs(record: TensorRecord, dtype: torch.dtype) -> bool:
    """Return whether a tensor holds values as they are in a float dtype that is not `dtype`."""
    stored = record.dtype
    return (record.packed is None and not record.opaque and stored != dtype and stored.is_floating_point
            and stored.itemsize > 1 and dtype.is_floating_point)
