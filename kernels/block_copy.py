"""`forebay::block_copy`: destination[to_blocks[i]] = source[from_blocks[i]], a gather and a scatter of cache blocks.

On a GPU all blocks move in one launch, and either side may lie in pinned host memory, where a copy per block would pay
some microseconds each. A pair in which either index is out of range, say -1, is left out.
"""

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


@torch.library.custom_op("forebay::block_copy", mutates_args=("destination",), device_types="cpu")
def block_copy(source: Tensor, from_blocks: Tensor, destination: Tensor, to_blocks: Tensor) -> None:
    """Move blocks of source [Ns, ...] into destination [Nd, ...]; tables int32 or int64 [n]; writes destination only.

    source and destination must not share memory, nor may a destination block be named twice. ValueError names the
    argument that is wrong.
    """
    check(source, from_blocks, destination, to_blocks)
    begin, end = from_blocks.long(), to_blocks.long()
    fits = (begin >= 0) & (begin < len(source)) & (end >= 0) & (end < len(destination))
    destination.index_copy_(0, end[fits], source.index_select(0, begin[fits]))


@block_copy.register_kernel("cuda")
def _(source: Tensor, from_blocks: Tensor, destination: Tensor, to_blocks: Tensor) -> None:
    from forebay.kernels.gpu.block_copy import block_copy as launch

    launch(source, from_blocks, destination, to_blocks)


@block_copy.register_fake
def _(source: Tensor, from_blocks: Tensor, destination: Tensor, to_blocks: Tensor) -> None:
    return None
