"""Exchanges in an order in which ranks would wait for each other are found before any is begun; their times are of the
device of the rank."""

from __future__ import annotations

import random
import threading
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.runtime.comm.ranks import Exchanges, first_unmet
from forebay.runtime.devices.kinds import HOST
from forebay.runtime.devices.streams import Worker
from forebay.runtime.measure import mesh

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


def test_exchanges_are_waited_for_on_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that makes them has a current device of its own, the first."""
    current, waited = threading.local(), list[int]()
    current.number = 3
    module = SimpleNamespace(current_device=lambda: getattr(current, "number", 0),
                             synchronize=lambda device=None: waited.append(module.current_device()
                                                                          if device is None else device))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(mesh, "group_of", lambda ranks: None)
    monkeypatch.setattr(mesh, "from_all", lambda own: [own])
    monkeypatch.setitem(mesh.EXCHANGES, mesh.functional.all_reduce.default, lambda *_: None)
    with closing(Worker("collect")) as worker:
        assert mesh.ExchangeTurns("all_reduce", (0,), worker, HOST).time_s(64, 0) >= 0
    assert waited == [3] * mesh.REPEATS
