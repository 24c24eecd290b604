"""Slices of files: rows of tables whose pieces lie apart, and where in pages they lie."""

from __future__ import annotations

import random

from forebay.rewriter.ir.program import Band, FileSlice
from forebay.rewriter.ir.schedule.routed_fetch import PLACED_NBYTES, expert_place


def test_rows_are_the_parts_that_they_should_be() -> None:
    draw = random.Random(3)
    for _ in range(40):
        rows, pieces = draw.randint(1, 6), draw.randint(1, 3)
        sizes = [8 * draw.randint(1, 9) for _ in range(pieces)]
        bands = tuple(Band(8 * draw.randrange(1000), 1, n, ((0, n),), draw.choice(("", "b")))
                      for _ in range(rows) for n in sizes)
        for table in (FileSlice("a", 0, rows * sum(sizes), bands), FileSlice("a", 64, rows * sum(sizes))):
            row = table.rows(sum(sizes))
            assert [row(i) for i in range(rows)] == [table.part(i * sum(sizes), sum(sizes)) for i in range(rows)]


def test_most_bytes_say_where_in_a_page_they_begin() -> None:
    """The large piece lies 24 bytes behind the small one in memory, so its page begins 24 bytes before it."""
    bands = Band(5000, 1, 24, ((0, 24),)), Band(2 * 4096 + 1040, 1, PLACED_NBYTES, ((0, PLACED_NBYTES),))
    entry = FileSlice("a", 0, PLACED_NBYTES + 24, bands)
    assert entry.page_offset == 1040 - 24 and FileSlice("a", 5000, 9).page_offset == 5000 - 4096
    assert expert_place(entry) == (1040 - 24) // 8
    assert expert_place(FileSlice("a", 5001, PLACED_NBYTES)) == 0 == expert_place(FileSlice("a", 4104, 64))
