"""One vector of the vectors of all tokens of a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def pool(hidden: torch.Tensor, mask: torch.Tensor, poolings: Sequence[str]) -> torch.Tensor:
    """Pool hidden states.

    Args:
        hidden: [B, T, H].
        mask: [B, T], 1 where a token counts.
        poolings: Names of ways, as sentence-transformers has them, which are joined.

    Returns:
        [B, H times the number of ways].
    """
    weights = mask[..., None].to(hidden.dtype)
    return torch.cat([WAYS[name](hidden, weights) for name in poolings], 1)


def _first(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return hidden[torch.arange(len(hidden)), weights[..., 0].argmax(1)]


def _last(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    last = weights.shape[1] - 1 - weights[..., 0].flip(1).argmax(1)
    return hidden[torch.arange(len(hidden)), last]


def _mean(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


def _weighted(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Later tokens weigh more, by their positions from 1."""
    return _mean(hidden, weights * torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype)[None, :, None])


WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cls": _first, "lasttoken": _last, "mean": _mean, "weightedmean": _weighted,
    "max": lambda hidden, weights: hidden.masked_fill(weights == 0, -1e9).amax(1),
    "mean_sqrt_len_tokens": lambda hidden, weights: (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9).sqrt()}
