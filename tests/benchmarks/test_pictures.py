"""The pictures of the pages come from recorded results: their bars are the figures that the pages quote."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import pictures

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_each_picture_is_drawn_and_is_there(name: str) -> None:
    axes = pictures.PICTURES[name]().axes[0]
    assert axes.get_title() and axes.get_legend() is not None
    assert (ROOT / f"docs/pictures/{name}.png").stat().st_size > 5000


def test_the_readme_quotes_what_is_drawn() -> None:
    heights = {f"{bar.get_height():.3g}" for draw in (pictures.draw_large, pictures.draw_equal_budget)
               for bar in draw().axes[0].patches}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    quoted = {"4.49", "0.398", "5.25", "6.28", "58.1", "12"}
    assert quoted <= heights and all(figure in readme for figure in quoted)
