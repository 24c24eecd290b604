"""Open whatever a folder holds: a safetensors checkpoint, sharded or not, or a quantized one."""

from __future__ import annotations

import os
from pathlib import Path

from forebay.rewriter.checkpoints.checkpoint import Checkpoint, open_safetensors
from forebay.rewriter.checkpoints.packed import is_quantized, open_quantized


def open_checkpoint(path: str | os.PathLike[str], *, verify: bool = False) -> Checkpoint:
    """Open a folder (model.safetensors, or model.safetensors.index.json and its shards; or a quantized model) or one
    .safetensors file.

    Only headers are read and every one is checked against its file, so a truncated file, a hole, an overlap or a
    duplicate raises CheckpointError here and not in the middle of a run. Pickle checkpoints are refused. With `verify`
    every weight is read and compared with its checksum, which only a quantized model has.
    """
    path = Path(path).expanduser()
    if path.is_dir() and is_quantized(path):
        return open_quantized(path, check="always" if verify else "changed")
    return open_safetensors(path, verify=verify)
