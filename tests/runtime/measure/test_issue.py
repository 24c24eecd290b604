"""What a copy costs the thread that computes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.runtime.disk.chunks import Read, split_bands
from forebay.runtime.disk.reader import open_reader
from forebay.runtime.measure import issue
from forebay.runtime.measure.machine import landing_memory, temporary_file

PAGES = 64


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    with temporary_file(tmp_path) as (descriptor, path):
        with open(descriptor, "wb", closefd=False) as file:
            file.write(b"x" * (PAGES * PAGE_NBYTES))
        yield path


def measured(path: str) -> tuple[float, float]:
    with contextlib.closing(open_reader("direct", 2, 1 << 20)) as reader:
        return issue.issue_times_s(reader, path, PAGES * PAGE_NBYTES, landing_memory(1 << 21), True)


def test_it_is_what_turns_with_copies_take_beyond_those_without(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []

    def turn_s(products: Iterator, beside: list) -> float:
        turns.append(len(beside))
        for calls in beside:
            assert len(calls) in (0, 3), "its issue, its record and a wait"
            for call in calls:
                call()
        return 1.0 + 32 * (0.0, 3e-4, 3e-4 + 9 * 2e-5)[(len(turns) - 1) % 3]

    monkeypatch.setattr(issue, "_turn_s", turn_s)
    assert measured(path) == pytest.approx((3e-4, 2e-5))
    assert turns == [1, issue.SLOTS, issue.SLOTS] * issue.QUICK_TURNS


def test_slices_of_a_copy_are_read_one_by_one(path: str) -> None:
    nbytes = 64 << 20
    parts = [issue._pages(path, nbytes, i, issue.SLICES) for i in range(issue.SLOTS)]
    assert [part.slices for part in parts] == [issue.SLICES] * issue.SLOTS
    read = Read(path, 0, parts[0].nbytes, PAGE_NBYTES, 0, 0, lambda error: None, parts[0].bands)
    assert len(split_bands(read, True, 4 << 20, 4 << 20)) == issue.SLICES
    assert issue._pages(path, nbytes, 3, 1).slices == 1
    assert parts[-1].offset + parts[-1].bands[-1].offset + PAGE_NBYTES <= nbytes


def test_a_turn_is_products_each_behind_what_is_beside_it() -> None:
    made: list[str] = []
    beside = [[lambda: made.append("issue 0")], [lambda: made.append("issue 1"), lambda: made.append("wait 0")]]
    assert issue._turn_s(itertools.repeat(lambda: made.append("product")), beside) > 0
    assert made == ["issue 0", "product", "issue 1", "wait 0", "product"] * (issue.LAUNCHES // 2)
