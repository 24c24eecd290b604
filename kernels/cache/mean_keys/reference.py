"""The definition of `forebay::mean_keys`."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.formats.key_means import KEYS_OF_MEAN, means_of


def reference(
    k_cache: Tensor, means: Tensor, place: Tensor, start: Tensor, tokens: int, block_tokens: int, lot: int = 1 << 30
) -> None:
    """Write the means in fp32, of so many blocks at a time."""
    known = means_of(means, k_cache.shape[3])
    each = block_tokens // KEYS_OF_MEAN
    for b, (at, first) in enumerate(zip(place.tolist(), start.tolist(), strict=True)):
        number, end = first // block_tokens, (first + tokens) // block_tokens
        shift = at // block_tokens - number
        for lower in range(number, end, lot):
            upper = min(end, lower + lot)
            keys = k_cache[b, :, (lower + shift) * block_tokens : (upper + shift) * block_tokens]
            means_now = keys.unflatten(1, (-1, KEYS_OF_MEAN)).mean(2, dtype=torch.float32)
            known[b, :, lower * each : upper * each] = means_now
