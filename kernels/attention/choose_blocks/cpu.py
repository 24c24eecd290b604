"""`forebay::choose_blocks` on the CPU: in C++, which reads each mean once, or by torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from torch import Tensor

from forebay.kernels.attention.choose_blocks.reference import reference
from forebay.kernels.cpu_support import native
from forebay.kernels.formats.key_means import KEYS_OF_MEAN
from forebay.kernels.operator import dtype_of


class ChooseBlocksArgs(ctypes.Structure):
    """Mirror of `ChooseBlocksArgs` in choose_blocks.cpp; strides are in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "means", "start", "begun", "out")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "dim", "blocks", "each", "block_tokens",
                                              "q_batch", "q_head", "means_batch", "means_head")),
        ("scale", ctypes.c_double),
        ("share", ctypes.c_double),
        ("dtype", ctypes.c_int32),
    )


def workspace_nbytes(q: Tensor, means: Tensor) -> int:
    """Upper bound of a call's workspace in bytes. By torch it holds the table and, for one sequence, scores in both
    precisions, their exponents and sums, and a copy of the means where the matmul wants other strides."""
    batch, heads = q.shape[:2]
    parts = means.shape[2] // KEYS_OF_MEAN
    copied = 0 if native.load() else means.shape[1] * means.shape[2] * means.shape[3] * dtype_of(means).itemsize
    return 24 * heads * parts + 2 * copied + 32 * (batch + 1) * parts + 4 * heads * q.shape[3] + (1 << 14)


def bind_choose_blocks(
    q: Tensor, means: Tensor, start: Tensor, begun: Tensor, scale: float, share: float, block_tokens: int, out: Tensor
) -> Callable[[], None]:
    """A closure that fills out from the tensors' present contents. ValueError for blocks that hold no whole means."""
    batch, heads, _, dim = q.shape
    if block_tokens % KEYS_OF_MEAN or means.shape[3] * KEYS_OF_MEAN != dim:
        raise ValueError(f"choose_blocks: blocks of {block_tokens} tokens, means of {KEYS_OF_MEAN} keys of "
                         f"{dim} elements and a state {tuple(means.shape)} do not go together")
    blocks, each = means.shape[2] // block_tokens + 1, block_tokens // KEYS_OF_MEAN
    if native.load() is None or q.stride(3) != 1 or means.dtype != q.dtype or q.dtype not in native.DTYPES:

        def by_torch() -> None:
            out.copy_(reference(q, means, start, begun, scale, share, block_tokens, q.dtype))

        return by_torch
    args = ChooseBlocksArgs(
        *(t.data_ptr() for t in (q, means, start, begun, out)),
        batch, heads, means.shape[1], dim, blocks, each, block_tokens, *q.stride()[:2], *means.stride()[:2], scale,
        share, native.DTYPES[q.dtype],
    )  # fmt: skip

    def refuse() -> None:
        raise ValueError(f"choose_blocks: positions {start.tolist()} are not all within a state of {means.shape[2]}")

    floats = heads * (dim + blocks * each + 1) + 2 * blocks
    return native.NativeCall("choose_blocks", args, (q, means, start, begun, out), floats, refuse)
