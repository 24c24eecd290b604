"""Pope et al.'s tables and FlexGen's Table 3 within their bounds; every number is predicted anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.papers import flexgen_pipeline, pope
from benchmarks.papers.tables import Row
from forebay.rewriter.partition.collectives import TPU_STEP_S, mesh_of
from forebay.rewriter.partition.published_models import PUBLISHED_SHAPES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return pope.rows()


def fitted_step_s() -> float:
    """Seconds of a collective's step that give `STEP_ROW_S`, by bisection: the pass takes longer with it."""
    low, high = 0.0, 1e-4
    while high - low > 1e-9:
        middle = (low + high) / 2
        slow = pope.pass_s(PUBLISHED_SHAPES["palm-540b"], mesh_of(pope.MACHINE, pope.CUBE, step_s=middle),
                           pope.step(64, pope.CONTEXT + 32), "2d", "batch") > pope.STEP_ROW_S
        low, high = (low, middle) if slow else (middle, high)
    return low


def test_what_is_bounded_holds(rows: list[Row]) -> None:
    bounded = [r for r in rows if r.bound is not None]
    assert [r.row for r in bounded if not r.holds] == []
    assert len([r for r in bounded if r.bound == 0.10]) == 6  # Table 1
    assert len([r for r in bounded if r.bound == 0.25]) == 16  # Tables 2 and 3: latency and MFU of eight
    assert len([r for r in bounded if r.bound == 0.15]) == 2 and len([r for r in bounded if r.bound == 0.20]) == 6


def test_medians_are_of_all_printed_figures(rows: list[Row]) -> None:
    found = [r for r in rows if "Table D." in r.table]
    assert len(found) == 3 * 9 * 4 and {r.bound for r in found} == {None}


def test_layouts_switch_in_the_published_order() -> None:
    assert pope.switches_3() == pope.switches_7() == ["2d", "x", "xy", "xyz"]


def test_one_constant_is_fitted_and_on_a_row_that_is_not_judged(rows: list[Row]) -> None:
    assert fitted_step_s() == pytest.approx(TPU_STEP_S, rel=0.005)
    assert [(round(r.paper, 6), r.bound) for r in rows if r.note == "fitted"] == [(36.9, None)]


def test_frontiers_have_the_published_systems(rows: list[Row]) -> None:
    """Whose point is the last of each frontier, printed and predicted, and that PaLM is on all of them, TP32 on none;
    the points between lie closer together than predictions err."""
    ours = [r for r in rows if "Table D." in r.table]
    for table, last in (("D.2", "TP16"), ("D.3", "PaLM"), ("D.4", "PP3/TP8")):
        for printed in (True, False):
            found = pope.frontier(table, ours, printed=printed)
            assert found[-1][0] == last and "PaLM" in {name for name, _ in found}
        assert not any(name == "TP32" for name, _ in found)


def test_sections_sentences(rows: list[Row]) -> None:
    said = {r.row: r.predicted for r in rows if r.table.endswith("section 4")}
    assert said["serial to parallel blocks, decode, batch 512"] > 1
    assert said["palm-540b, decode, batch 512: 1D to 2D"] > 1


def test_four_machines_decode_more_than_four_times_as_fast() -> None:
    for model, (printed, predicted) in flexgen_pipeline.scaling().items():
        assert printed > 4 and predicted > 4, model


def test_the_document_shows_these_numbers(rows: list[Row]) -> None:
    shown = (ROOT / "docs" / "partitioning.md").read_text(encoding="utf-8")
    for row in rows:
        lines = [line.split("|") for line in shown.splitlines() if line.startswith(f"| {row.row} | {row.unit} |")]
        assert any(float(cells[3]) == pytest.approx(row.paper, rel=1e-3)
                   and float(cells[4]) == pytest.approx(row.predicted, rel=5e-3) for cells in lines), row.row
