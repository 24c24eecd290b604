"""Processing of a sequence's logits before its next token is chosen: penalties, biases and constraints; and the log
probabilities that the model gave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from forebay.runtime.run.sampling import Sampling

ONE_THREAD = 32768  # numbers that torch's elementwise operators leave to one thread (its GRAIN_SIZE)


class Constraint(Protocol):
    """The tokens that may follow in one sequence, as of a grammar."""

    def only(self) -> int | None:
        """Return the next token, where no other is allowed; else None."""
        ...

    def allowed(self, drafted: Sequence[int]) -> list[torch.Tensor]:
        """Return whether each token may come next, bool [V], after every prefix of `drafted` that is itself allowed."""
        ...

    def advance(self, token: int) -> None:
        """Take the next token of the sequence."""
        ...


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities that the model gave, before penalties and temperature: of the token that was chosen, and of the
    most likely ones, as pairs of token and value."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def processed(
    logits: torch.Tensor, sampling: Sampling, prompt: torch.Tensor, new: Sequence[int],
    constraint: Constraint | None = None, drafted: Sequence[int] = (), in_place: bool = False,
) -> torch.Tensor:
    """Return the logits [N, V] from which the next tokens of a sequence are chosen.

    Args:
        logits: Of the model, [N, V], after the last token and after each of N - 1 drafted ones.
        sampling: Its penalties and biases.
        prompt: Tokens of the prompt [P].
        new: Tokens of the answer so far.
        constraint: What may follow `new`. Rows after a drafted token that may not are left as they are, because such a
            token is refused.
        drafted: The drafted tokens.
        in_place: Whether `logits` may be overwritten.

    Returns:
        `logits` themselves, or float32 where penalties or biases change them.
    """
    scores = logits
    if sampling.changes_logits:
        scores = logits.to(torch.float32, copy=True)
        for i, row in enumerate(scores):
            _penalize(row, sampling, prompt, [*new, *drafted[:i]])
    elif constraint is not None and not in_place:
        scores = logits.clone()
    if constraint is not None:
        for row, allowed in zip(scores, constraint.allowed(drafted[: len(scores) - 1]), strict=False):
            _hold(row, allowed.to(row.device))
    return scores


def _hold(row: torch.Tensor, allowed: torch.Tensor) -> None:
    """Leave only allowed tokens in logits [V], in place. On a CPU each part is too short for torch's threads, whose
    start takes 0.2 ms."""
    size = ONE_THREAD if row.is_cpu else len(row)
    for part, kept in zip(row.split(size), allowed.split(size), strict=True):
        part.masked_fill_(~kept, float("-inf"))


def _penalize(row: torch.Tensor, sampling: Sampling, prompt: torch.Tensor, new: Sequence[int]) -> None:
    """Apply penalties and biases to logits [V] in place."""
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt.tolist(), *new}), device=row.device)
        scores = row[seen]
        row[seen] = torch.where(scores < 0, scores * sampling.repetition_penalty, scores / sampling.repetition_penalty)
    if new and (sampling.frequency_penalty or sampling.presence_penalty):
        counts = Counter(new)
        row[torch.tensor(list(counts), device=row.device)] -= torch.tensor(
            [sampling.frequency_penalty * count + sampling.presence_penalty for count in counts.values()],
            device=row.device)
    if sampling.logit_bias:
        tokens, biases = zip(*sampling.logit_bias, strict=True)
        row.index_add_(0, torch.tensor(tokens, device=row.device), torch.tensor(biases, device=row.device))


def logprobs_of(logits: torch.Tensor, token: int, top: int) -> TokenLogprobs:
    """Log probabilities of a token and of the `top` most likely ones, by the model's logits [V]."""
    scores = logits.float()
    total = float(scores.logsumexp(0))
    values, tokens = scores.topk(min(top, len(scores)))
    most = tuple((t, v - total) for t, v in zip(tokens.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token, float(scores[token]) - total, most)
