"""`forebay::block_copy`: destination[to_blocks[i]] = source[from_blocks[i]], a gather and a scatter of cache blocks.

On a GPU all blocks move in one launch, and either side may lie in pinned host memory, where a copy per block would pay
some microseconds each. A pair in which either index is out of range, say -1, is left out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forebay.kernels.cache.block_copy.reference import check, reference
from forebay.kernels.operator import Cost, Operator, Use, dtype_of, nbytes_of


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
    from forebay.kernels.cache.block_copy.gpu import block_copy as launch

    launch(source, from_blocks, destination, to_blocks)


@block_copy.register_fake
def _(source: Tensor, from_blocks: Tensor, destination: Tensor, to_blocks: Tensor) -> None:
    return None


def _cost(use: Use) -> Cost:
    """The named blocks alone."""
    source, named, _, targets = use.args
    moved = named.shape[0] * math.prod(source.shape[1:]) * dtype_of(source).itemsize
    return Cost(0, moved + nbytes_of(named, targets), moved)


BLOCK_COPY = Operator(torch.ops.forebay.block_copy.default, reference, _cost)
