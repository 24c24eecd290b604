"""Sizes and budgets as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.rewriter.ir.byte_sizes import UNITS, format_nbytes, parse_budget, parse_nbytes
from forebay.rewriter.ir.plan import Budget, PlanError


@pytest.mark.parametrize(("text", "nbytes"), [
    ("4096", 4096), ("1B", 1), ("1kb", 1000), ("1 KiB", 1024), ("1K", 1024), ("120MiB", 120 << 20),
    ("500MB", 500_000_000), (" 1.5 GiB ", 3 << 29), ("0.5tb", 500_000_000_000), ("1T", 1 << 40), (7, 7),
])
def test_reads_what_people_write(text: int | str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", [
    "", "MiB", "12 parsecs", "-4", "1e9", "1.5.2GB", "0", "0.1B", 0, -3, True, 1.5, None, b"1",
    "9" * 400, "9" * 30 + "TB",
])
def test_refuses_the_rest_naming_what_it_was_for(text: object) -> None:
    with pytest.raises(PlanError, match=r"budget\.device"):
        parse_nbytes(text, "budget.device")  # type: ignore[arg-type]


@given(st.integers(1, 1 << 50))
def test_every_integer_is_read_back_exactly(nbytes: int) -> None:
    assert parse_nbytes(nbytes) == parse_nbytes(str(nbytes)) == nbytes


@given(st.integers(1, 1000), st.sampled_from(sorted(UNITS)))
def test_units_multiply(count: int, unit: str) -> None:
    assert parse_nbytes(f"{count}{unit}") == count * UNITS[unit]


@given(st.integers(1, 1 << 45))
def test_format_can_be_read_back_to_within_its_digit(nbytes: int) -> None:
    back = parse_nbytes(format_nbytes(nbytes))
    assert abs(back - nbytes) <= max(0.05 * back, 1)
    assert nbytes >= 1024 or back == nbytes


def test_budget_from_everything_that_means_one(tmp_path: Path) -> None:
    whole = Budget(1 << 20, 2_000_000, "/spill")
    assert parse_budget(whole) is whole
    assert parse_budget(1 << 20) == parse_budget("1MiB") == parse_budget({"device": "1MiB"}) == Budget(1 << 20)
    assert parse_budget("device=1MiB, host=2MB, disk=/spill") == whole
    assert parse_budget({"device": 1 << 20, "host": "2MB", "disk": Path("/spill")}) == whole
    assert parse_budget({"device": 1, "host": 0}) == parse_budget({"device": 1, "host": None}) == Budget(1)


@pytest.mark.parametrize(("budget", "names"), [
    ({"vram": 5, "device": 5}, "unknown tier 'vram'.*device, host, disk"),
    ("device=1MiB,gpu=2", "unknown tier 'gpu'"),
    ({"host": 5}, "device=500MB"),
    ({"device": "lots"}, "budget.device"),
    ("device=1MiB,host=much", "budget.host"),
    (3.5, "float"), ([1], "list"), (None, "NoneType"), (0, "budget.device"), ("", "budget.device"),
])
def test_bad_budget_is_refused_by_tier(budget: object, names: str) -> None:
    with pytest.raises(PlanError, match=names):
        parse_budget(budget)
