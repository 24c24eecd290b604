"""Durations for people: each in a unit that fits."""

from __future__ import annotations

import pytest

from forebay.rewriter.ir.durations import format_seconds


@pytest.mark.parametrize(("seconds", "text"), [
    (0.0, "0 us"), (0.000228, "228 us"), (0.0229, "22.9 ms"), (0.85, "850 ms"), (3.33, "3.33 s"), (19.3, "19.3 s"),
    (119.4, "119 s"), (780.3, "13 min"), (7499, "2 h 05 min")])
def test_each_in_a_unit_that_fits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
