"""Ranges of scores that contradict themselves are refused by field."""

from __future__ import annotations

import math

import pytest

from forebay.rewriter.ir.score_range import ScoreRange, check_ranges

GOOD = ScoreRange(0, 1.0, -9.0, 11.0)


@pytest.mark.parametrize(("ranges", "field"), (
    ((GOOD, GOOD), "[1].layer"), ((ScoreRange(0, math.nan, -9.0, 11.0),), "[0].phi"),
    ((GOOD, ScoreRange(1, 0.0, -math.inf, 11.0)), "[1].low"), ((ScoreRange(0, 0.0, 2.0, 2.0),), "[0].high"),
))  # fmt: skip
def test_what_is_no_range_is_refused(ranges: tuple[ScoreRange, ...], field: str) -> None:
    with pytest.raises(ValueError) as error:
        check_ranges(ranges)
    assert str(error.value).startswith(field)


def test_what_is_one_is_taken() -> None:
    check_ranges((GOOD, ScoreRange(3, -80.0, -60.0, 60.0)))
