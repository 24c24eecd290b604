"""`forebay::mean_keys` on the CPU: by torch, some blocks at a time."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from forebay.kernels.cache.mean_keys.reference import reference

LOT = 32  # blocks whose keys are fp32 at a time


def workspace_nbytes(k_cache: Tensor, block_tokens: int) -> int:
    """Upper bound of a call's workspace in bytes."""
    return 6 * LOT * block_tokens * k_cache.shape[1] * k_cache.shape[3] + (1 << 16)


def bind_mean_keys(
    k_cache: Tensor, means: Tensor, place: Tensor, start: Tensor, tokens: int, block_tokens: int
) -> Callable[[], None]:
    """A closure that writes the means from the tensors' present contents."""
    return lambda: reference(k_cache, means, place, start, tokens, block_tokens, LOT)
