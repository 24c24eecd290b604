"""What prompt lookup drafts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.runtime.run.drafts import LONGEST_MATCH, Drafted, PromptLookup


def looked_up(tokens: list[int], most: int) -> Drafted:
    return PromptLookup().draft({0: torch.tensor(tokens, dtype=torch.int64)}, {0: most})[0]


def by_hand(tokens: list[int], most: int) -> Drafted:
    """Every match by slices, the longest first and of those the latest."""
    for length in range(min(LONGEST_MATCH, len(tokens) - 1), 0, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:] and most > 0:
                out = list(tokens)
                for i in range(most):
                    out.append(out[end + i])
                return Drafted(tuple(out[len(tokens) :]), length)
    return Drafted()


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 12))
def test_the_longest_and_latest_match_goes_on(tokens: list[int], most: int) -> None:
    assert looked_up(tokens, most) == by_hand(tokens, most)


def test_each_sequence_has_its_own() -> None:
    held = {5: torch.tensor([1, 2, 3, 1, 2]), 0: torch.tensor([4, 5]), 2: torch.tensor([7, 7, 7])}
    drafts = PromptLookup().draft(held, {5: 2, 0: 3, 2: 4})
    assert drafts == {5: Drafted((3, 1), 2), 0: Drafted(), 2: Drafted((7, 7, 7, 7), 2)}
