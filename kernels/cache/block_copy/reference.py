"""The definition of `forebay::block_copy`, and the checks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(source: Tensor, from_blocks: Tensor, destination: Tensor, to_blocks: Tensor) -> Tensor:
    """A new destination, block by block; any device."""
    made = destination.clone()
    for begin, end in zip(from_blocks.tolist(), to_blocks.tolist(), strict=True):
        if 0 <= begin < len(source) and 0 <= end < len(destination):
            made[end] = source[begin]
    return made


def check(source: Tensor, from_blocks: Tensor, destination: Tensor, to_blocks: Tensor) -> None:
    """ValueError names the argument whose shape or dtype is wrong."""
    for tensor, name in ((source, "source"), (destination, "destination")):
        if tensor.dim() == 0:
            raise ValueError(f"block_copy: {name} must be [blocks, ...], got a number")
    if destination.dtype != source.dtype or destination.shape[1:] != source.shape[1:]:
        raise ValueError(f"block_copy: destination must have blocks {tuple(source.shape[1:])} of {source.dtype} as "
                         f"source has, got {tuple(destination.shape[1:])} of {destination.dtype}")  # fmt: skip
    for table, name in ((from_blocks, "from_blocks"), (to_blocks, "to_blocks")):
        if table.dim() != 1 or table.shape != from_blocks.shape or table.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"block_copy: {name} must be int32 or int64 of shape {tuple(from_blocks.shape[:1])}, got "
                             f"{table.dtype} {tuple(table.shape)}")  # fmt: skip
