"""The clock of a server by its measured steps, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.server_load import clock_of, logged
from forebay.rewriter.predict.of_programs import StepTimes

TIMES = StepTimes(4, 1, 32, 48, (16, 8), {1: (0.5, 0.5), 8: (1.0, 1.0), 16: (2.0, 2.0)})


def test_steps_take_what_the_servers_own_took_then(tmp_path: Path) -> None:
    """Steps of one token took 2 s on average, four times as long as predicted, and those of 16 tokens 4 s. One of 1 s
    ran fast, one of 3 s slowly; who begins in the middle of that has half of it, and goes on at the next one's pace."""
    (tmp_path / "log").write_text("9.5 7\n10 1 5 1.0\n11 1 5 3.0\n12.25 8\n20 16 16 4.0\n24 1 5 2.0\n")
    clock = clock_of(tmp_path / "log", TIMES)
    assert [clock(at_s, 1, 0.5) for at_s in (10, 11, 12.5, 20, 24)] == pytest.approx([1, 3, 1.5 + 1, 2, 2])
    assert [clock(at_s, 16, 2.0) for at_s in (10, 15, 20, 24, 40)] == pytest.approx([4, 4, 4, 4, 4])
    assert clock(10.75, 8, 1.0) == pytest.approx(0.25 + 3 + 10 / 3.5 - 2.5)  # of a size that never ran: as all
    assert [line for line in logged(tmp_path / "log") if len(line) == 2] == [[9.5, 7], [12.25, 8]]
