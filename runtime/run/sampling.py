"""Choose next tokens from logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """Greedy unless `do_sample`; then temperature, then the `top_k` most likely (0: all), then the smallest set that
    holds `top_p` of the probability, as Hugging Face orders them."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.do_sample:
            return  # the rest is of no effect
        if not self.temperature > 0:
            raise ValueError(f"temperature: {self.temperature} is not above 0; for greedy decoding use do_sample=False")
        if self.top_k < 0:
            raise ValueError(f"top_k: {self.top_k} is negative")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p} is not in [0, 1]")


def choose(
    logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | Sequence[torch.Generator] | None = None
) -> torch.Tensor:
    """Token ids [B] int64 for logits [B, V]; with a generator for each row, its draws are those of the row alone."""
    if not sampling.do_sample:
        return logits.argmax(-1)
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        lowest = scores.topk(sampling.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < lowest, float("-inf"))
    if sampling.top_p < 1:
        ascending, order = scores.sort(-1)
        drop = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        drop[:, -1] = False
        scores = scores.masked_fill(drop.scatter(-1, order, drop), float("-inf"))
    chances = scores.softmax(-1)
    if generator is None or isinstance(generator, torch.Generator):
        return torch.multinomial(chances, 1, generator=generator).squeeze(-1)
    return torch.cat([torch.multinomial(row, 1, generator=g) for row, g in zip(chances, generator, strict=True)])
