"""Choose next tokens from logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from forebay.kernels.operators import SAMPLING

Generators = torch.Generator | Sequence[torch.Generator] | None  # one for all rows, one for each, or torch's own
LEAST_TOP_P = 1e-9  # the kernel wants some of the probability; so little keeps the likeliest token alone


@dataclass(frozen=True)
class Sampling:
    """Greedy unless `do_sample`; then temperature, then the `top_k` most likely (0: all), then the smallest set that
    holds `top_p` of the probability, then those of at least `min_p` of the most likely one's probability, as Hugging
    Face orders them.

    Attributes:
        repetition_penalty: Divides positive logits of tokens of prompt and answer, and multiplies negative ones.
        frequency_penalty: Taken off a token's logit for each time that it is in the answer.
        presence_penalty: Taken off the logits of all tokens of the answer.
        logit_bias: Added to the logits of tokens, as pairs of both.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def changes_logits(self) -> bool:
        """Whether a token's logit depends on the tokens before it, or has a bias."""
        return bool(self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty or self.logit_bias)

    def __post_init__(self) -> None:
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty: {self.repetition_penalty} is not above 0")
        if not self.do_sample:
            return  # the rest is of no effect
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p: {self.min_p} is not in [0, 1]")
        if not self.temperature > 0:
            raise ValueError(f"temperature: {self.temperature} is not above 0; for greedy decoding take 0 in a "
                             "command, do_sample=False in Python")
        if self.top_k < 0:
            raise ValueError(f"top_k: {self.top_k} is negative")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p} is not in [0, 1]")


def choose(logits: torch.Tensor, sampling: Sampling, generator: Generators = None) -> torch.Tensor:
    """Token ids [B] int64 for logits [B, V]. With one generator the draws are torch.multinomial's, a row at a time on
    the generator's device; of a CPU's generator they are those of transformers under the same seed. With a generator
    for each row a row's token depends on its own draws alone: one uniform number each, which `forebay::sampling` turns
    into a token where the logits lie."""
    if not sampling.do_sample:
        return most_likely(logits)
    if generator is not None and not isinstance(generator, torch.Generator):
        return drawn(logits, sampling, torch.cat([
            torch.rand(1, generator=g, device=g.device).to(logits.device) for g in generator]))
    # On a CPU torch draws the numbers of one row after those of the row before.
    where = logits.device if generator is None else generator.device
    return _row_by_row(logits, where, lambda row, i: torch.multinomial(
        probabilities(row.to(where), sampling), 1, generator=generator)[0])


def drawn(logits: torch.Tensor, sampling: Sampling, uniforms: torch.Tensor) -> torch.Tensor:
    """Token ids [B] int64 for logits [B, V] by a uniform number for each row. Those of the host go to a GPU through
    pinned memory: nothing waits for what computes the logits."""
    options = sampling.temperature, sampling.top_k, max(sampling.top_p, LEAST_TOP_P)
    if not logits.is_cpu and uniforms.is_cpu:
        uniforms = uniforms.pin_memory().to(logits.device, non_blocking=True)
    if sampling.min_p:  # the operator draws from what is left
        return _row_by_row(logits, logits.device, lambda row, i: SAMPLING.overload(
            row.masked_fill(probabilities(row, sampling) == 0, float("-inf")), uniforms[i : i + 1],
            sampling.temperature, 0, 1.0))
    if not logits.is_cpu:
        return SAMPLING.overload(logits, uniforms, *options)  # type: ignore[no-any-return]
    return _row_by_row(logits, logits.device, lambda row, i: SAMPLING.overload(row, uniforms[i : i + 1], *options))


def _row_by_row(
    logits: torch.Tensor, where: torch.device, draw: Callable[[torch.Tensor, int], torch.Tensor]
) -> torch.Tensor:
    """Tokens [B], on the device `where`, that `draw` gives for a row [1, V] and its number, which takes some 100 bytes
    a logit in passing. All tokens lie in one tensor: tensors of their own would lie between larger blocks of the heap,
    and keep these apart."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=where)
    for i in range(len(logits)):
        tokens[i : i + 1] = draw(logits[i : i + 1], i)
    return tokens


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    """Token ids [...] of the largest of logits [..., V], of equals the first: as by argmax, which on a CPU takes four
    times as long in bfloat16."""
    return logits.max(-1).indices


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distributions [B, V], float32, that `sampling` draws from for logits [B, V]."""
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        lowest = scores.topk(sampling.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < lowest, float("-inf"))
    if sampling.top_p < 1:
        ascending, order = scores.sort(-1)
        drop = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        drop[:, -1] = False
        scores = scores.masked_fill(drop.scatter(-1, order, drop), float("-inf"))
    if sampling.min_p:
        chances = scores.softmax(-1)
        scores = scores.masked_fill(chances < sampling.min_p * chances.amax(-1, keepdim=True), float("-inf"))
    return scores.softmax(-1)
