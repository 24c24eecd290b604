"""Choosing tokens: greedy, temperature, top-k and top-p with Hugging Face's meaning."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forebay.runtime.run.request import OneCall, Request
from forebay.runtime.run.sampling import Sampling, choose, probabilities
from forebay.runtime.run.token_sampler import TokenSampler

LOGITS = torch.randn(4, 30, generator=torch.Generator().manual_seed(0)) * 3


def support(sampling: Sampling, logits: torch.Tensor = LOGITS, draws: int = 300, each: bool = False) -> list[set[int]]:
    """The tokens that are ever chosen, per row, by one generator or by one for each row."""
    generator = torch.Generator().manual_seed(1)
    if each:
        generator = [torch.Generator().manual_seed(i) for i in range(len(logits))]  # type: ignore[assignment]
    found: list[set[int]] = [set() for _ in logits]
    for _ in range(draws):
        for row, token in zip(found, choose(logits, sampling, generator).tolist(), strict=True):
            row.add(token)
    return found


def allowed(warpers: list, logits: torch.Tensor = LOGITS) -> list[set[int]]:
    """The tokens that transformers leaves possible."""
    scores = logits
    for warper in warpers:
        scores = warper(None, scores)
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in scores]


def test_greedy_takes_the_largest_and_needs_no_generator() -> None:
    for sampling in (Sampling(), Sampling(temperature=9.0, top_k=3, top_p=0.1)):
        tokens = choose(LOGITS, sampling)
        assert tokens.dtype == torch.int64 and torch.equal(tokens, LOGITS.argmax(-1))


@pytest.mark.parametrize("sampling", [Sampling(True, top_k=1), Sampling(True, top_p=1e-6, top_k=0),
                                      Sampling(True, top_p=0.0, top_k=0),
                                      Sampling(True, temperature=1e-4)])
def test_the_narrowest_sampling_is_greedy(sampling: Sampling) -> None:
    for each in (False, True):
        assert support(sampling, draws=20, each=each) == [{t} for t in LOGITS.argmax(-1).tolist()]


def test_the_same_generator_gives_the_same_tokens() -> None:
    first, second = (choose(LOGITS, Sampling(True), torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, second)
    others = [choose(LOGITS, Sampling(True), torch.Generator().manual_seed(i)) for i in range(9)]
    assert any(not torch.equal(first, other) for other in others)


def test_a_generator_for_each_row_draws_for_it_alone() -> None:
    def generators(rows: range) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(row) for row in rows]

    for _ in range(3):
        together = choose(LOGITS, Sampling(True), generators(range(4)))
        alone = [choose(LOGITS[i : i + 1], Sampling(True), generators(range(i, i + 1))) for i in range(4)]
        assert torch.equal(together, torch.cat(alone))
    with pytest.raises(ValueError):
        choose(LOGITS, Sampling(True), generators(range(3)))


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [
    (1.0, 5, 1.0), (1.0, 0, 0.8), (0.7, 12, 0.9), (2.0, 7, 0.5), (1.0, 500, 1.0), (1.0, 30, 0.999),
])
@pytest.mark.parametrize("each", [False, True])
def test_only_tokens_that_transformers_allows_are_chosen(
    temperature: float, top_k: int, top_p: float, each: bool
) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers: list = [TemperatureLogitsWarper(temperature)] if temperature != 1 else []
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    found, possible = support(Sampling(True, temperature, top_k, top_p), each=each), allowed(warpers)
    assert all(f <= p for f, p in zip(found, possible, strict=True))
    assert sum(map(len, found)) > 0.5 * sum(min(len(p), 12) for p in possible), "as good as nothing was tried"


@pytest.mark.parametrize(("count", "words"), [(1, 1), (3, 7), (5, 16), (4, 1000), (9, 4099)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_one_by_one_draw_what_torch_draws_of_all(count: int, words: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(count, words, generator=torch.Generator().manual_seed(words)) * 3).to(dtype)
    for sampling in (Sampling(True, top_k=0), Sampling(True, 0.7, 50, 0.9, 0.05)):
        ours, theirs = (torch.Generator().manual_seed(3) for _ in range(2))
        for _ in range(3):  # the next column goes on where this one ends
            expected = torch.multinomial(probabilities(logits, sampling), 1, generator=theirs).squeeze(-1)
            assert torch.equal(choose(logits, sampling, ours), expected)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            assert torch.equal(choose(logits, sampling), choose(logits, sampling, torch.Generator().manual_seed(3)))


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(6000, 3)
    for temperature in (1.0, 0.5):
        expected, one = (logits[0] / temperature).softmax(-1), torch.Generator().manual_seed(3)
        for generator in (one, [one] * 6000):
            counts = choose(logits, Sampling(True, temperature, 0), generator).bincount(minlength=3)
            assert (counts / 6000 - expected).abs().max() < 0.03  # five standard deviations


def test_half_precision_logits() -> None:
    tokens = choose(LOGITS.to(torch.bfloat16), Sampling(True, 0.8, 5, 0.9), torch.Generator().manual_seed(0))
    assert tokens.shape == (4,) and tokens.dtype == torch.int64


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 40), st.floats(0.01, 1.0), st.floats(0.05, 5.0), st.integers(0, 999))
def test_every_row_always_has_a_token(top_k: int, top_p: float, temperature: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 20, generator=generator) * 10
    tokens = choose(logits, Sampling(True, temperature, top_k, top_p), generator)
    assert ((tokens >= 0) & (tokens < 20)).all()


@pytest.mark.parametrize(("bad", "names"), [(dict(temperature=0.0), "temperature: 0.0.*do_sample=False"),
                                            (dict(temperature=-1.0), "temperature"), (dict(top_k=-1), "top_k: -1"),
                                            (dict(top_p=-0.1), "top_p: -0.1"), (dict(top_p=1.1), "top_p: 1.1"),
                                            (dict(temperature=float("nan")), "temperature: nan"),
                                            (dict(min_p=1.5), "min_p: 1.5"),
                                            (dict(repetition_penalty=0.0), "repetition_penalty: 0.0")])
def test_bad_settings_are_refused_by_name(bad: dict, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        Sampling(True, **bad)


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest result of an operator has that shows no argument's memory."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        given, made = ([t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)] for tree in ((args, kwargs), out))
        known = {t.untyped_storage().data_ptr() for t in given}
        self.numel = max([self.numel, *(t.numel() for t in made if t.untyped_storage().data_ptr() not in known)])
        return out


@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_a_gpu_copies_a_row_at_a_time(monkeypatch: pytest.MonkeyPatch, min_p: float) -> None:
    """What lies on another device than the host gives the host's tokens. Drawn with one generator, or with min_p, no
    more than a row is copied or made anew; the kernel that draws by a number for each row takes all as they lie."""
    sampling = Sampling(True, top_k=12, min_p=min_p)
    requests = {n: Request(torch.tensor([1]), 1, partial(torch.Generator().manual_seed, n)) for n in range(3)}
    generator = torch.Generator()
    call = OneCall(1, 4, True, generator)

    def tokens() -> list[list[int]]:
        own = TokenSampler(sampling, requests, {number: [] for number in requests}, None)
        generator.manual_seed(3)
        together = TokenSampler(sampling, {}, {}, call)
        with Largest() as seen:
            found = [together.chosen([0, 1, 2], LOGITS, [3, 0, 2])]
            assert seen.numel <= LOGITS.shape[1]
            found.append(own.chosen([0, 1, 2], LOGITS, [3, 0, 2]))
        assert not min_p or seen.numel <= LOGITS.shape[1]
        return found

    here = tokens()
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    assert tokens() == here
