"""Speeds that were measured are kept by plan, and shown by later plans of the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forebay.commands import seen_speeds
from forebay.commands.app import app
from forebay.commands.seen_speeds import note_speed, seen_line
from forebay.rewriter.ir.plan import Limits, Plan, Schedule, Workload, load_plan
from forebay.rewriter.machine.profile import Machine, save_machine

PLAN = Plan("model", "machine", Limits(1 << 20), Workload(2, 8, 8), Schedule(), ())


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "kept"))


def test_the_last_measurement_of_a_plan_is_shown() -> None:
    assert seen_line(PLAN) is None
    note_speed(PLAN, 10, 5.0)
    note_speed(PLAN, 20, 2.0)
    line = seen_line(PLAN)
    assert line is not None and "measured    10 tokens/s" in line and "of 20 tokens" in line


@pytest.mark.parametrize("other", [
    replace(PLAN, fingerprint="another"), replace(PLAN, budget=Limits(2 << 20)), replace(PLAN, cache_format="kv8"),
    replace(PLAN, workload=Workload(4, 8, 8)),
])
def test_a_measurement_is_of_one_model_budget_batch_and_cache(other: Plan) -> None:
    note_speed(PLAN, 10, 5.0)
    assert seen_line(other) is None


def test_a_plan_that_never_ran_here_is_uncalibrated(llama_checkpoint: Any, tmp_path: Path) -> None:
    save_machine(Machine.default(), profile := tmp_path / "machine.json")

    def planned() -> str:
        found = CliRunner().invoke(app, ["plan", str(llama_checkpoint.folder), "--new-tokens", "2", "--save-plan",
                                         str(tmp_path / "plan.json"), "--machine", str(profile)])
        assert found.exit_code == 0, found.output
        return found.output

    assert f"uncalibrated: {seen_speeds.UNSEEN}" in planned()
    note_speed(load_plan(tmp_path / "plan.json"), 10, 5.0)
    assert "uncalibrated" not in (again := planned()) and "measured    2 tokens/s" in again


def test_few_tokens_are_no_figure() -> None:
    note_speed(PLAN, seen_speeds.LEAST - 1, 5.0)
    assert seen_line(PLAN) is None


def test_only_the_latest_plans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_speeds, "MOST", 2)
    others = [replace(PLAN, fingerprint=name) for name in "abc"]
    for plan in (*others[:2], others[0], others[2]):
        note_speed(plan, 10, 5.0)
    assert [seen_line(plan) is not None for plan in others] == [True, False, True]


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": {"tokens_per_s": "fast"}}', "\x00"])
def test_a_file_that_is_not_ours_counts_as_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / seen_speeds.FILE).write_text(text, encoding="utf-8")
    assert seen_line(PLAN) is None
    note_speed(PLAN, 10, 5.0)
    assert seen_line(PLAN) is not None


def test_a_folder_that_cannot_be_made_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "file" / "below"))
    note_speed(PLAN, 10, 5.0)
    assert seen_line(PLAN) is None
