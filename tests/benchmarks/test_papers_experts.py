"""Rates of mixtures of experts: the page has each published one beside the predicted, and explains those outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.papers.experts import BOUND, CASES, machine_of, name_of, rows
from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.predict.estimator import MachineEstimator

PAGE = Path(__file__).resolve().parents[2] / "docs" / "papers.md"
CELLS = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
         for cells in (line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines()) if len(cells) == 9}
EXPLAINED = {"KTransformers 0.2, one socket, deepseek-v3, decode",
             "KTransformers 0.2, two sockets, deepseek-v3, decode", "OSDI '26, FP8, deepseek-v3, prompts",
             "MoE-Gen, deepseek-v2, decode", "MoE-Gen, deepseek-v3, prompts", "MoE-Gen, deepseek-v3, decode"}


def test_the_page_has_each_published_rate() -> None:
    names = {name_of(case, phase): rate for case in CASES for phase, rate in case["paper"].items()}
    outside = set()
    for name, rate in names.items():
        unit, paper, predicted, error, bound, note = CELLS[name]
        assert (unit, bound) == ("token/s", f"{100 * BOUND:.0f} %") and float(paper) == pytest.approx(rate, rel=1e-3)
        off = float(predicted) / rate - 1
        assert float(error.removesuffix(" %")) == pytest.approx(100 * off, abs=0.1)
        assert ("outside" in note) == (abs(off) > BOUND)
        outside |= {name} if abs(off) > BOUND else set()
    assert outside == EXPLAINED and len(names) == 13


def test_a_host_multiplies_and_attends_at_its_memorys_rate() -> None:
    times = MachineEstimator(machine_of("rtx4090", 100.0))
    assert times.host_product_s("w4g32", 7e9, 1e15) == times.host_attention_s(7e9, 1e15) == pytest.approx(0.1)
    preset = PRESETS["a5000"]
    assert machine_of("a5000", 0) is preset
    latents = MachineEstimator(preset).host_attention_s(1.0, 1e15)  # many heads share a row: operations bind
    assert latents == pytest.approx(1e15 / preset.host_product_flops)


@pytest.mark.all
def test_predictions_are_those_of_the_page() -> None:
    for row in rows():
        assert float(CELLS[row.row][2]) == pytest.approx(row.predicted, rel=5e-3), row.row
