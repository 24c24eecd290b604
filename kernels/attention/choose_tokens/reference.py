"""The definition of `forebay::choose_tokens`."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    q: Tensor, weights: Tensor, k: Tensor, keys: Tensor, start: Tensor, count: int, dtype: torch.dtype = torch.float64
) -> Tensor:
    """By the definition, scores in dtype; new keys are written to `keys`."""
    found = start.new_full((*q.shape[:2], count), -1)
    for b, begin in enumerate(start.tolist()):
        keys[b, 0, begin : begin + q.shape[1]] = k[b]
        for s in range(q.shape[1]):
            seen = keys[b, 0, : begin + s + 1].to(dtype)
            scores = weights[b, s].to(dtype) @ (q[b, s].to(dtype) @ seen.mT).relu()
            chosen = scores.topk(min(count, begin + s + 1)).indices.sort().values
            found[b, s, : chosen.numel()] = chosen
    return found
