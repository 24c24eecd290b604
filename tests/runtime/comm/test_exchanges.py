"""Exchanges in an order in which ranks would wait for each other are found before any is begun."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from forebay.runtime.comm.ranks import Exchanges, first_unmet

Group = tuple[int, ...]
groups = st.lists(st.integers(0, 3), min_size=2, max_size=4, unique=True).map(lambda ranks: tuple(sorted(ranks)))


def of_ranks(order: list[tuple[Group, str]]) -> list[Exchanges]:
    """What each of four ranks takes part in, of exchanges in one order."""
    return [[exchange for exchange in order if rank in exchange[0]] for rank in range(4)]


@given(st.lists(groups, max_size=12))
def test_one_order_of_all_is_an_order_of_each(order: list[Group]) -> None:
    assert first_unmet(of_ranks([(group, str(i)) for i, group in enumerate(order)])) is None


@given(st.lists(groups, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_what_one_rank_exchanges_otherwise_is_found(order: list[Group], draw: random.Random) -> None:
    found = of_ranks([(group, str(i)) for i, group in enumerate(order)])
    rank = draw.choice([r for r in range(4) if found[r]])
    at = draw.randrange(len(found[rank]))
    found[rank][at] = found[rank][at][0], "other"
    unmet = first_unmet(found)
    assert unmet is not None and unmet[0] != unmet[1]


def test_a_circle_of_pairs_that_agree_is_found() -> None:
    ab, bc, ca = ((0, 1), "x"), ((1, 2), "y"), ((0, 2), "z")
    assert first_unmet([[ab, ca], [ab, bc], [bc, ca]]) is None
    waiting = first_unmet([[ab, ca], [bc, ab], [ca, bc]])
    assert waiting is not None, "each pair meets once, and none of them ever does"
    assert first_unmet([[ab], []]) == (0, 1)
