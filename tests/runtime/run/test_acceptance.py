"""Accepted tokens have the distribution of plain decoding, whatever was drafted."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from forebay.runtime.run.acceptance import Acceptance, DraftCalibration, accepted, best_size, without_refused
from forebay.runtime.run.drafts import Drafted
from forebay.runtime.run.sampling import Sampling, choose, probabilities

VOCAB, DRAWS = 7, 100_000


def test_greedy_takes_what_is_most_likely_and_one_more() -> None:
    logits = torch.eye(VOCAB)[[3, 1, 4, 1]]
    for drafted, expected in (((), [3]), ((3, 1, 4), [3, 1, 4, 1]), ((3, 1, 5), [3, 1, 4]), ((2, 1, 4), [3]),
                              ((3, 1, 4, 1, 5), [3, 1, 4, 1])):
        assert accepted(logits[: len(drafted) + 1], Drafted(drafted), Sampling(), None) == expected


@pytest.mark.parametrize("sampling", [Sampling(True, 1.3, 4, 1.0), Sampling(True, 0.9, 5, 0.8)])
def test_tokens_are_distributed_as_plain_draws(sampling: Sampling) -> None:
    """Pairs of tokens, of which the second depends on the first, against the exact probabilities; drafts come from
    other distributions, over tokens too that top-k and top-p leave out."""
    g = torch.Generator().manual_seed(5)
    first, second = torch.randn(VOCAB, generator=g), torch.randn(VOCAB, VOCAB, generator=g)  # by the token before
    chances = torch.randn(2, VOCAB, generator=g).softmax(-1).double()
    expected = (probabilities(first[None], sampling)[0][:, None] * probabilities(second, sampling)).flatten()
    counts, draws = torch.zeros(VOCAB, VOCAB), 4000
    for guess, then in torch.multinomial(chances, draws, replacement=True, generator=g).T.tolist():
        logits = torch.stack((first, second[guess], second[then]))
        found = accepted(logits, Drafted((guess, then), chances=chances), sampling, g)
        if len(found) == 1:
            found += choose(second[found[0]][None], sampling, g).tolist()
        counts[found[0], found[1]] += 1
    fits(counts.flatten(), expected.double())


def test_a_drawn_token_has_the_targets_distribution() -> None:
    g = torch.Generator().manual_seed(1)
    target, drafted = torch.randn(2, VOCAB, generator=g).mul(1.5).softmax(-1).double()
    counts, kept = torch.zeros(VOCAB), 0
    tables = torch.stack((target, target)), drafted[None]
    for guess in torch.multinomial(drafted, DRAWS, replacement=True, generator=g).tolist():
        found = without_refused(*tables, [guess], g)
        counts[found[0]] += 1
        kept += len(found) - 1
    fits(counts, target)
    overlap = float(torch.minimum(target, drafted).sum())  # Leviathan et al., corollary 3.6
    assert abs(kept / DRAWS - overlap) < 4 * math.sqrt(overlap * (1 - overlap) / DRAWS)


def fits(counts: torch.Tensor, expected: torch.Tensor) -> None:
    """Nothing was counted where nothing is expected, and the rest passes a chi-square test."""
    there = expected > 0
    assert not counts[~there].any(), "a token was drawn that top-k or top-p leaves out"
    many = (expected[there] / expected[there].sum() * counts.sum()).numpy()
    assert stats.chisquare(counts[there].double().numpy(), many).pvalue > 1e-3


def test_draws_that_are_given_a_draft_are_those_without_it() -> None:
    """One draw for each token, in order: the very tokens, not their distribution alone."""
    logits, sampling = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(1)), Sampling(True, 1.0, 0, 0.9)
    for kind in (lambda: torch.Generator().manual_seed(2), lambda: [torch.Generator().manual_seed(2)]):
        g, tokens = kind(), []
        for row in logits:
            tokens += choose(row[None], sampling, g).tolist()
        g, found = kind(), []
        while len(found) < 40:
            rest = tokens[len(found) :][:5]
            if len(found) % 3 == 0:
                rest[-1] = (rest[-1] + 1) % VOCAB  # wrong at the end
            found += accepted(logits[len(found) :][: len(rest) + 1], Drafted(tuple(rest)), sampling, g)
        assert found[:40] == tokens


def test_alike_distributions_refuse_nothing_and_break_nothing() -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, VOCAB, generator=g)
    chances = logits[:1].softmax(-1).double() * (1 + 1e-9)  # a rounding more than the target's
    for token in range(VOCAB):
        for _ in range(50):
            assert len(accepted(logits, Drafted((token,), chances=chances), Sampling(True, 1.0, 0), g)) == 2


def test_acceptance_follows_what_is_seen_of_a_kind() -> None:
    seen, draft, other = Acceptance(), Drafted((1,) * 8, 1), Drafted((1,) * 8, 2)
    before = seen.expected(draft, 8)
    for _ in range(60):
        seen.note(draft, 8, 8)
        seen.note(other, 8, 0)
    assert seen.expected(draft, 8) > 8.5 > before > seen.expected(other, 8) and seen.expected(other, 8) < 1.2
    for _ in range(60):
        seen.note(draft, 8, 0)
    assert seen.expected(draft, 8) < 1.2, "what was seen long ago is not forgotten"
    assert seen.expected(Drafted(), 8) == seen.expected(draft, 0) == 1
    seen.note(Drafted((), 9), 0, 0)
    assert seen.expected(Drafted((1,) * 3, 9), 8) == pytest.approx(1 + 0.5 + 0.25 + 0.125)


def test_what_is_known_of_each_token_counts_for_the_step() -> None:
    seen = Acceptance()
    assert seen.expected(Drafted((1, 2, 3), stands=(0.9, 0.5, 0.1)), 2) == pytest.approx(1 + 0.9 + 0.45)
    sure = DraftCalibration()
    assert [sure.chance(given) for given in (0.1, 0.11, 1.0)] == pytest.approx([0.1**0.5, 0.1**0.5, 0.95**0.5])
    for _ in range(500):
        sure.note((0.1, 0.4, 0.7, 0.7), 2)  # the last one was not checked
    assert sure.chance(0.15) > 0.99 < sure.chance(0.4) and sure.chance(0.7) < 0.02
    assert sure.chance(0.95) == pytest.approx(0.95**0.5)
    surer = DraftCalibration(0.79**0.5)  # of a draft whose tokens stand so much more often
    assert [surer.chance(given) for given in (0.1, 1.0)] == pytest.approx([0.1**0.25, 0.95**0.25])
    assert DraftCalibration(0.0).chance(0.5) == sure.chance(0.5) and DraftCalibration(1.0).chance(0.1) > 0.9
    times_s, low, high = {1: 1.0, 2: 1.3, 8: 2.5}, (0.2,) * 7, (0.95,) * 7
    assert [best_size({0: Drafted((1,) * 7, stands=stands)}, {0: seen}, times_s) for stands in (low, high)] == [1, 8]


def test_the_step_is_chosen_that_gives_most_tokens_per_second() -> None:
    drafts, seen = {0: Drafted((1,) * 15)}, {0: Acceptance()}
    assert best_size(drafts, seen, {1: 1.0, 4: 1.01, 16: 1.09}) == 4  # 1 of 2 tokens right: 16 give 1.07 as many
    assert best_size(drafts, seen, {1: 1.0, 4: 1.9, 16: 4.0}) == 1
    for _ in range(60):
        seen[0].note(drafts[0], 15, 15)
    assert best_size(drafts, seen, {1: 1.0, 4: 1.9, 16: 4.0}) == 16
    assert best_size({0: Drafted()}, seen, {1: 1.0, 4: 1.0, 16: 1.0}) == 1, "of equals the shortest"
    assert best_size({0: Drafted()}, seen, {1: 1.0, 4: 0.99, 16: 0.98}) == 1, "nothing is drafted"
    assert best_size({0: Drafted((1, 2))}, seen, {1: 1.0, 4: 0.99, 16: 0.98}) == 4, "more than it holds"
