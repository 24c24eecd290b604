"""benchmarks.large: bytes that a step read, by what was seen of a process, and the table of turns."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.large import CELLS, ReadWatch, report


def test_a_step_read_what_the_process_read_after_the_first_token() -> None:
    watch = ReadWatch(0)
    watch.seen = [(10.0, 100), (12.0, 500), (14.0, 700), (16.0, 900)]  # 4 s of two steps at the end
    assert watch.step_nbytes(4.0, 2) == 200


def test_cells_have_names_of_their_own() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS)


def test_the_table_has_medians_and_leaves_out_turns_that_failed(capsys: pytest.CaptureFixture[str]) -> None:
    def turn(**more: Any) -> dict[str, Any]:
        return {"cell": "8b, 2 GB", "name": "forebay", "batch": 2} | more

    measured = {"prefill_s": 3.0, "step_read_nbytes": 2e9, "read_bytes_per_s": 2e9, "group_peak": 5e9}
    sampled = turn(steps_s=[1.0], **{k: v for k, v in measured.items() if k != "prefill_s"}) | {"name": "sampled"}
    report([turn(steps_s=[1.0, 3.0], **measured), turn(steps_s=[4.0], **measured), turn(failed="signal 9"),
            turn(steps_s=[1.0], **measured), turn(failed="signal 9") | {"name": "peer"}, sampled])
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| 8b, 2 GB | forebay | 1 (0.5 to 2) | 3.0 | 2.00 | 50% | 5.00 |", "| 8b, 2 GB | peer | signal 9 | | | | |",
        "| 8b, 2 GB | sampled | 2 (2 to 2) | - | 2.00 | 100% | 5.00 |"]
