"""Draws of transformers' generation that come from generators of the caller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers.generation import LogitsProcessor

from forebay.runtime.run.sampling import Sampling, choose


class DrawEach(LogitsProcessor):
    """Leaves of each row's scores the one token that the row's own generator draws."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = generators

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        token = choose(scores, Sampling(True, 1.0, 0, 1.0), self.generators)[:, None]
        return torch.full_like(scores, float("-inf")).scatter(1, token, 0.0)  # type: ignore[return-value]


@contextmanager
def drawing_from(generator: torch.Generator | None) -> Iterator[None]:
    """Let torch's global draws come from `generator`, which must be on the CPU, and go on where they end."""
    if generator is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(generator.get_state())
        yield
        generator.set_state(torch.get_rng_state())
