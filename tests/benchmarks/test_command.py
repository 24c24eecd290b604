"""The command line of benchmarks, and the table that they print."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.command import arguments, listed, print_table, spread, write_json


def test_options_are_of_the_type_of_their_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def asked(*words: str) -> dict[str, object]:
        monkeypatch.setattr(sys, "argv", ["bench", *words])
        return vars(arguments("doc", ("first", "second"), rounds=(3, "rounds"), shares=([0.5], "shares"),
                              batch_slots=(listed(int), "slots"), quick=(False, "quick"), whole=(bool, "whole")))

    assert asked() == {"case": "first", "rounds": 3, "shares": [0.5], "batch_slots": None, "quick": False,
                       "whole": None, "json": None}
    given = asked("second", "--shares", "0.25,1", "--batch-slots", "2,4", "--quick", "--no-whole", "--json",
                  str(tmp_path / "out"))
    assert given["case"] == "second" and given["shares"] == [0.25, 1.0] and given["batch_slots"] == [2, 4]
    assert given["quick"] is True and given["whole"] is False and given["json"] == tmp_path / "out"
    with pytest.raises(SystemExit):
        asked("--rounds", "few")


def test_a_spread_is_the_median_and_both_ends() -> None:
    assert spread([3.0, 1.0, 2.5]) == "2.5 (1 to 3)" and spread([0.5], ".0%") == "50%"


def test_columns_are_those_that_any_row_has(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([{"who": "a", "empty": "", "s": 1234.5}, {"who": "longer", "s": 0.25, "more": "x"}])
    assert capsys.readouterr().out.splitlines() == [
        "| who    | s        | more |", "| ------ | -------- | ---- |", "| a      | 1.23e+03 |      |",
        "| longer | 0.25     | x    |"]


def test_a_file_is_written_where_one_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--json", str(tmp_path / "out.json")])
    write_json(arguments("doc"), {"rows": [1]})
    assert (tmp_path / "out.json").read_text() == '{\n "rows": [\n  1\n ]\n}\n'
