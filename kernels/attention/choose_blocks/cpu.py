"""`forebay::choose_blocks` on the CPU: by torch, whose matmul reads each mean once."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from forebay.kernels.attention.choose_blocks.reference import reference
from forebay.kernels.formats.key_means import KEYS_OF_MEAN
from forebay.kernels.operator import dtype_of


def workspace_nbytes(q: Tensor, means: Tensor) -> int:
    """Upper bound of a call's workspace in bytes. It holds the table and, for one sequence, scores in both precisions,
    their exponents and sums, and a copy of the means where torch's matmul wants other strides."""
    batch, heads = q.shape[:2]
    parts = means.shape[2] // KEYS_OF_MEAN
    copied = means.shape[1] * means.shape[2] * means.shape[3] * dtype_of(means).itemsize
    return 24 * heads * parts + 2 * copied + 32 * (batch + 1) * parts + (1 << 14)


def bind_choose_blocks(
    q: Tensor, means: Tensor, start: Tensor, begun: Tensor, scale: float, share: float, block_tokens: int, out: Tensor
) -> Callable[[], None]:
    """A closure that fills out from the tensors' present contents. ValueError for blocks that hold no whole means."""
    if block_tokens % KEYS_OF_MEAN or means.shape[3] * KEYS_OF_MEAN != q.shape[3]:
        raise ValueError(f"choose_blocks: blocks of {block_tokens} tokens, means of {KEYS_OF_MEAN} keys of "
                         f"{q.shape[3]} elements and a state {tuple(means.shape)} do not go together")

    def run() -> None:
        out.copy_(reference(q, means, start, begun, scale, share, block_tokens, q.dtype))

    return run
