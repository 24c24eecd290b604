"""The definition of `forebay::choose_blocks`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forebay.kernels.formats.key_means import KEYS_OF_MEAN, chosen_count, means_of


def reference(
    q: Tensor, means: Tensor, start: Tensor, begun: Tensor, scale: float, share: float, block_tokens: int,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """By the definition, scores in dtype."""
    batch, dim = q.shape[0], q.shape[3]
    blocks, each = means.shape[2] // block_tokens + 1, block_tokens // KEYS_OF_MEAN
    known = means_of(means, dim)
    places, table = start.clone(), start.new_full((batch, blocks), -1)
    for b, (position, more) in enumerate(zip(start.tolist(), begun.tolist(), strict=True)):
        full = position // block_tokens
        count = chosen_count(share, full)
        places[b] = count * block_tokens + position % block_tokens
        table[b, :count] = b * blocks + (torch.arange(full) if count == full else _weightiest(
            q[b, :, 0].to(dtype).view(known.shape[1], -1, dim) * scale, known[b, :, : full * each].to(dtype), full,
            count))
        table[b, count] = more
    return torch.cat((places, table.flatten()))


def _weightiest(q: Tensor, means: Tensor, full: int, count: int) -> Tensor:
    """q [Hkv, G, D] and the means [Hkv, n, D] of so many full blocks -> [count] numbers of blocks, ascending."""
    scores = (means @ q.mT).float().unflatten(1, (full, -1))  # so bf16 means are not copied, which took 5 times as long
    weights = scores.logsumexp(2).softmax(1).sum((0, 2))
    weights[[0, -1]] = math.inf
    return weights.topk(count).indices.sort().values
