"""Tokens that may follow, guessed without the model: a step over several costs little more than one over one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import torch

LONGEST_MATCH = 4  # tokens
MODEL = 0  # the kind of drafts that a model made


@dataclass(frozen=True)
class Drafted:
    """Tokens that may come next in a sequence. `kind` groups drafts that are as likely to be right; `chances` [N, V],
    float64, are the distributions that they were drawn from, where they were drawn; `given` what a model that drafted
    them gave each, and `stands` the chance that each stands where all before it do, as far as that is known; `ahead`:
    they were made while the pass before them ran."""

    tokens: tuple[int, ...] = ()
    kind: int = MODEL
    chances: torch.Tensor | None = None
    given: tuple[float, ...] = ()
    stands: tuple[float, ...] = ()
    ahead: bool = False


class Drafter(Protocol):
    """Drafts for sequences in rows of a batch; a further drafted token takes `token_time_s`, for all of them at once,
    and stands with `chance` where all before it do, as far as is known before a sequence's first draft. Before it the
    prompts of a whole batch take `prefill_s`."""

    @property
    def token_time_s(self) -> float: ...

    @property
    def prefill_s(self) -> float: ...

    @property
    def chance(self) -> float: ...

    def draft(
        self, held: Mapping[int, torch.Tensor], most: Mapping[int, int], least: float = 0.0
    ) -> dict[int, Drafted]:
        """By row, for each sequence of tokens int64 [T], prompt and answer so far, a draft of at most so many (0:
        none), none of which is known to stand with less than the chance `least`. A row may have a new sequence."""
        ...

    def note(self, draft: Drafted, offered: int, right: int) -> None:
        """Record that the first `right` of a draft's first `offered` tokens, which were checked, were accepted."""


def alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class PromptLookup:
    """Drafts of the tokens that followed an earlier occurrence of the last tokens, in prompt or answer (Saxena, prompt
    lookup decoding, 2023): behind the longest match of at most `LONGEST_MATCH` tokens, of those the latest. `kind` is
    its length."""

    token_time_s, prefill_s, chance = 0.0, 0.0, 0.5

    def note(self, draft: Drafted, offered: int, right: int) -> None:
        """Nothing: each text has its own share of them."""

    def draft(
        self, held: Mapping[int, torch.Tensor], most: Mapping[int, int], least: float = 0.0
    ) -> dict[int, Drafted]:
        return {row: _looked_up(tokens, most[row]) for row, tokens in held.items()}


def _looked_up(tokens: torch.Tensor, most: int) -> Drafted:
    if most < 1 or len(tokens) < 2:
        return Drafted()
    ends = (tokens[:-1] == tokens[-1]).nonzero()[:, 0]  # positions of the last token of each match
    length = 0
    while len(ends):
        length, latest = length + 1, int(ends[-1])
        if length == LONGEST_MATCH:
            break
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[len(tokens) - 1 - length]] if length < len(tokens) else ends[:0]
    if not length:
        return Drafted()
    behind = tokens[latest + 1 :].tolist()  # what ends with the sequence goes on as it has repeated itself
    return Drafted(tuple(behind[i % len(behind)] for i in range(most)), length)
