"""Objects made while the collector was out of the way are looked through when there are many."""

from __future__ import annotations

import gc
import weakref

import pytest

import forebay.rewriter.garbage as garbage
from forebay.rewriter.garbage import DUE, collect_when_due, no_collection


@pytest.fixture(autouse=True)
def as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite has fewer collections (`tests/conftest.py`)."""
    monkeypatch.setattr(garbage, "DUE", DUE)


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_what_was_made_uncounted_is_freed_once_it_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.unfreeze()  # what files before this one left: beside frozen objects these would stay among the youngest
    monkeypatch.setattr(garbage, "_frozen", [False])
    with no_collection():
        made = [_Cycle() for _ in range(DUE + 1)]
        seen = weakref.ref(made[0])
        del made
    assert seen() is not None
    collect_when_due()
    assert seen() is None


def test_what_somebody_keeps_frozen_stays_so_and_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until all objects are looked through: it may have been given back since."""
    counted, count = [], gc.get_freeze_count
    monkeypatch.setattr(garbage, "_frozen", [False])
    monkeypatch.setattr(gc, "get_freeze_count", lambda: (counted.append(count()), count())[1])
    gc.freeze()
    for _ in range(3):
        with no_collection():
            pass
    assert len(counted) == 1 and counted[0] > 0, "frozen objects that die by their last reference are counted no more"
    assert count() > 0
    monkeypatch.setattr(garbage, "_unseen", [DUE + 1])
    collect_when_due()
    gc.unfreeze()
    for _ in range(2):
        with no_collection():
            pass
    assert len(counted) == 3 and counted[1:] == [0, 0]
