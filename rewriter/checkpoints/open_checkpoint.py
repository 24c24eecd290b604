"""Open whatever a folder holds: a safetensors checkpoint, sharded or not, a quantized or an adapted one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from forebay.rewriter.checkpoints.adapted import made_of, with_adapters
from forebay.rewriter.checkpoints.checkpoint import Checkpoint, open_safetensors
from forebay.rewriter.checkpoints.mlx import one_by_one
from forebay.rewriter.checkpoints.packed import is_quantized, open_quantized


def open_checkpoint(path: str | os.PathLike[str], *, verify: bool = False) -> Checkpoint:
    """Open a folder (model.safetensors, or model.safetensors.index.json and its shards; or a quantized or adapted
    model) or one .safetensors file.

    Only headers are read and every one is checked against its file, so a truncated file, a hole, an overlap or a
    duplicate raises CheckpointError here and not in the middle of a run. Pickle checkpoints are refused. With `verify`
    every weight is read and compared with its checksum, which only a quantized model has.
    """
    path = Path(path).expanduser()
    adapted = made_of(path)
    if adapted is not None:
        return with_adapters(path, adapted, open_checkpoint(adapted.base, verify=verify))
    if path.is_dir() and is_quantized(path):
        return open_quantized(path, check="always" if verify else "changed")
    found = open_safetensors(path, verify=verify)
    return replace(found, tensors=one_by_one(found.tensors))
