"""Objects made while the collector was out of the way are looked through when there are many."""

from __future__ import annotations

import gc
import weakref

from forebay.rewriter.garbage import DUE, collect_when_due, no_collection


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_what_was_made_uncounted_is_freed_once_it_is_much() -> None:
    gc.unfreeze()  # what files before this one left: beside frozen objects these would stay among the youngest
    with no_collection():
        made = [_Cycle() for _ in range(DUE + 1)]
        seen = weakref.ref(made[0])
        del made
    assert seen() is not None
    collect_when_due()
    assert seen() is None
