"""What a plan's times rest on is said where they were not measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from families import FAMILIES

from forebay.commands.plan import _plan_config
from forebay.commands.plan_config import PlanRequest
from forebay.rewriter.machine.points import GemmPoint
from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.planning.options import Options


def test_a_data_sheet_is_said(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    request = PlanRequest(str(tmp_path), "laptop-16gb", prompt=8, output=4, batch=1)
    _plan_config(request, Options(), False, None, None)
    assert "uncalibrated: times rest on data sheets" in capsys.readouterr().out


def test_guesses_are_counted_and_measured_rates_are_not_doubted() -> None:
    measured = replace(Machine.default(), gemm=(GemmPoint("flat", "float32", 1, 64, 64, 1.0),))
    assert measured.uncalibrated == ""
    assert replace(measured, guessed=("x", "y")).uncalibrated.startswith("2 rates are guesses")
    assert replace(measured, others_share=0.1).uncalibrated == ""
    assert replace(measured, others_share=0.72).uncalibrated.startswith("others used 72% of the cores")
    assert all(machine.uncalibrated for machine in PRESETS.values())
