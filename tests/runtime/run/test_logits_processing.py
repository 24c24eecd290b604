"""Penalties, biases, min_p and constraints are those of transformers' processors, and of every drafted position."""

from __future__ import annotations

import random

import pytest
import torch
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from forebay.runtime.run.drafts import Drafted
from forebay.runtime.run.logits_processing import TokenLogprobs, logprobs_of, processed
from forebay.runtime.run.request import Request
from forebay.runtime.run.sampling import Sampling, choose, probabilities
from forebay.runtime.run.token_sampler import TokenSampler

VOCABULARY = 40


@pytest.mark.parametrize("seed", range(8))
def test_equals_the_processors_of_transformers(seed: int) -> None:
    draw = random.Random(seed)
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    prompt, new = ([draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 9))] for _ in range(2))
    penalty, bias = draw.uniform(0.6, 1.8), {draw.randrange(VOCABULARY): draw.uniform(-5, 5) for _ in range(4)}
    temperature, top_k, top_p, min_p = draw.uniform(0.5, 2), draw.choice([0, 5]), draw.uniform(0.6, 1), 0.08
    sampling = Sampling(True, temperature, top_k, top_p, min_p, penalty, logit_bias=tuple(bias.items()))
    expected = LogitsProcessorList([
        RepetitionPenaltyLogitsProcessor(penalty), SequenceBiasLogitsProcessor([[[t], b] for t, b in bias.items()]),
        TemperatureLogitsWarper(temperature), *([TopKLogitsWarper(top_k)] if top_k else []), TopPLogitsWarper(top_p),
        MinPLogitsWarper(min_p)])(torch.tensor([prompt + new]), logits.clone()).softmax(-1)
    scores = processed(logits, sampling, torch.tensor(prompt), new)
    torch.testing.assert_close(probabilities(scores, sampling), expected)
    kept = {int(choose(scores, sampling, [torch.Generator().manual_seed(i)])) for i in range(300)}
    assert kept <= set(expected[0].nonzero()[:, 0].tolist()), "what is drawn"


def test_frequency_and_presence_are_of_the_answer_alone() -> None:
    """As OpenAI's reference defines them: logit - count * frequency - (count > 0) * presence."""
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1))
    found = processed(logits, Sampling(frequency_penalty=0.5, presence_penalty=0.25), torch.tensor([7, 8]), [3, 3, 9])
    expected = logits.clone()
    expected[0, 3] -= 1.25
    expected[0, 9] -= 0.75
    torch.testing.assert_close(found, expected)


class OddAfterEven:
    """Tokens alternate between even and odd ones, the first is even."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def only(self) -> None:
        return None

    def allowed(self, drafted: tuple[int, ...]) -> list[torch.Tensor]:
        masks, tokens = [], list(self.taken)
        for token in (*drafted, None):
            masks.append(torch.arange(VOCABULARY) % 2 == len(tokens) % 2)
            if token is None or not masks[-1][token]:
                break
            tokens.append(token)
        return masks

    def advance(self, token: int) -> None:
        assert token % 2 == len(self.taken) % 2
        self.taken.append(token)


@pytest.mark.parametrize("sampling", [
    Sampling(repetition_penalty=1.4, presence_penalty=0.5), Sampling(True, 0.9, 0, 1.0, 0.05, frequency_penalty=0.9)])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_change_no_token(sampling: Sampling, seed: int) -> None:
    """Tokens that are checked several at a time, right and wrong ones, are those of one at a time."""
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2  # by the last token
    prompt, draw = [5, 6], random.Random(seed)

    def answer(expected: list[int] | None) -> tuple[list[int], list[TokenLogprobs]]:
        told: list[TokenLogprobs] = []
        new: dict[int, list[int]] = {0: []}
        request = Request(torch.tensor(prompt), 12, lambda: torch.Generator().manual_seed(seed), sampling,
                          OddAfterEven, 2, told.append)
        sampler = TokenSampler(Sampling(), {0: request}, new, None)
        while len(new[0]) < 12:
            draft: list[int] = []
            if expected is not None:
                draft = expected[len(new[0]) :][: draw.randrange(4)]
                if draft and draw.random() < 0.5:
                    draft[-1] = draw.randrange(VOCABULARY)
            rows = table[[(prompt + new[0])[-1], *draft]]
            tokens = (sampler.accepted(0, rows, Drafted(tuple(draft))) if draft
                      else sampler.chosen([0], rows, [0]))
            for token in tokens:
                sampler.taken(0, token)
                new[0].append(token)
        return new[0][:12], told[:12]

    alone, logprobs = answer(None)
    assert answer(alone) == (alone, logprobs) and len(set(alone)) > 3
    last = (prompt + alone)[-2]
    assert logprobs[-1] == logprobs_of(table[last], alone[-1], 2)
    assert logprobs[-1].logprob == pytest.approx(float(table[last].log_softmax(0)[alone[-1]]), abs=1e-5)
    assert [t for t, _ in logprobs[-1].top] == table[last].topk(2).indices.tolist()


def test_requests_beside_each_other_keep_their_own() -> None:
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(2))
    best = logits.argmax(-1).tolist()
    biased = Sampling(logit_bias=((11, 100.0),))
    requests = {i: Request(torch.tensor([1]), 4, sampling=sampling) for i, sampling in enumerate((None, biased, None))}
    sampler = TokenSampler(Sampling(), requests, {0: [], 1: [], 2: []}, None)
    assert sampler.chosen([0, 1, 2], logits, [0, 1, 2]) == [best[0], 11, best[2]]
