"""The tensors that stored graphs hold beside weights, each once: rotary tables and the like, in a file of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch

from forebay.rewriter.checkpoints.checkpoint import read_header, read_tensor
from forebay.rewriter.checkpoints.write_tensors import write_tensors


def constant_key(value: torch.Tensor, kept: dict[str, torch.Tensor]) -> str:
    """The name under which a constant is kept, once however many graphs have it: a digest of it."""
    value = value.detach().cpu().contiguous()
    content = value.reshape(-1).view(torch.uint8).numpy().tobytes()
    key = hashlib.sha256(f"{value.dtype} {list(value.shape)} ".encode() + content).hexdigest()[:16]
    kept[key] = value
    return key


def write_constants(fd: int, folder: Path, kept: Mapping[str, torch.Tensor]) -> None:
    """Write the file; `folder` is named in errors."""
    write_tensors(fd, folder, [(key, v.dtype, tuple(v.shape)) for key, v in kept.items()], kept.__getitem__)


def read_constants(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of the file by their keys."""
    return {key: read_tensor(record) for key, record in read_header(path).items()}
