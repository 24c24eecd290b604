"""Memory that operators take on the CPU while they compute, in addition to their results.

Estimates of what PyTorch and oneDNN allocate: by the kernel's source for attention, generous ones by measurements for
convolutions and for matmuls in half precision, which depend on the processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
SCRATCH_NBYTES = 1 << 17  # of a thread in oneDNN, next to copies of operands
KEYS = 512  # in a step of attention
MAX_PATCHED = 20480  # numbers of an image that PyTorch convolves without oneDNN


def workspace_nbytes(func: Any, args: Any, result_nbytes: int) -> int:
    """Bound the bytes that an operator takes while it computes.

    Args:
        func: The operator.
        args: Its arguments.
        result_nbytes: Of its results.
    """
    known = WORKSPACES.get(func)
    return 0 if known is None else known(args, result_nbytes)


def _of_attention(args: Any, result_nbytes: int) -> int:
    """Source: PyTorch, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp: scores and sums of a block of queries in
    each thread; half precision has a second copy of them, and keys and values in other order."""
    query, key, value = args[:3]
    queries, keys, width = query.shape[-2], key.shape[-2], value.shape[-1]
    block = min(queries, 256 if queries >= 768 else 64 if queries >= 192 else 32)
    per_thread = block * (min(keys, KEYS) + 2 + width) * 4
    if query.itemsize == 4:
        return torch.get_num_threads() * per_thread
    return torch.get_num_threads() * per_thread * 2 + (key.numel() + value.numel()) * query.itemsize


def _of_convolution(args: Any, result_nbytes: int) -> int:
    """Operands in other order, then the result; for small images patches in place of them."""
    images, weight = args[:2]
    operands = [each.numel() * each.itemsize for each in (images, weight)]
    patches = result_nbytes // max(1, weight.shape[0]) * math.prod(weight.shape[1:])
    if images.itemsize == 4:
        in_patches = images.numel() <= MAX_PATCHED or not torch.backends.mkldnn.is_available()
        colors = weight.shape[1] in (1, 3)  # which are read in their order
        return max(patches * in_patches, result_nbytes, operands[1] + operands[0] * (not colors))
    threads = torch.get_num_threads()
    return (patches + sum(operands) + result_nbytes) * (2 + 3 * threads) // 2 + 3 * threads * SCRATCH_NBYTES


def _of_matmul(args: Any, result_nbytes: int) -> int:
    """Blocks of operands in each thread, where numbers have half precision."""
    first, second = args[-2:]
    if first.itemsize == 4:
        return 0
    copies = 4 * ((first.numel() + second.numel()) * first.itemsize + result_nbytes) + SCRATCH_NBYTES // 8
    return torch.get_num_threads() * min(first.shape[-1] * 1024 + SCRATCH_NBYTES, copies)


WORKSPACES: dict[Any, Callable[[Any, int], int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _of_attention,
    aten.convolution.default: _of_convolution,
    **dict.fromkeys((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default), _of_matmul),
}
