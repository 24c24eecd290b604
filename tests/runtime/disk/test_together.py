"""`Together` tells its one waiter exactly once, whichever part cannot be issued or not even be made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest

from forebay.runtime.disk.together import Together


@pytest.mark.parametrize("fails", ["no part", "a part", "making a part"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_who_waits_is_told_once_and_after_the_last_part(fails: str, at: int) -> None:
    told: list[BaseException | None] = []
    together = Together(3, told.append)
    error, issued = OSError(5, "no"), []

    def issue(number: int) -> None:
        if fails == "a part" and number == at:
            raise error
        issued.append(number)

    def parts() -> Iterator[Callable[[], object]]:
        for number in range(3):
            if fails == "making a part" and number == at:
                raise error
            yield functools.partial(issue, number)

    for _ in range(2):  # it may be issued again
        issued.clear()
        told.clear()
        together.issue(parts())
        assert issued == list(range(3 if fails == "no part" else at))
        assert len(told) == (not issued)
        for number in issued:
            together.part(None)
            assert len(told) == (number == issued[-1])
        assert told == [None if fails == "no part" else error]
