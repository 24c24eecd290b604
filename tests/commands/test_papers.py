"""`forebay papers` and the page have one list, whose options are those of the commands."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import typer
from typer.testing import CliRunner

from forebay.commands.app import app
from forebay.commands.mechanisms import MECHANISMS
from forebay.commands.papers import write_page

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_list(tmp_path: Path) -> None:
    page = tmp_path / "papers.md"
    shutil.copy(ROOT / "docs" / "papers.md", page)
    before = page.read_text(encoding="utf-8")
    write_page(page)
    assert page.read_text(encoding="utf-8") == before, "run make papers"
    page.write_text(before.replace("### FlexGen\n", "### Another\n"), encoding="utf-8")
    write_page(page)
    assert page.read_text(encoding="utf-8") == before


def test_options_that_turn_mechanisms_on_are_there() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    known = {option for command in commands.values() for parameter in command.params for option in parameter.opts}
    named = [option for rows in MECHANISMS.values() for row in rows
             for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", row.option)]
    assert len(named) > 15 and set(named) <= known


def test_the_command_shows_a_paper_or_all() -> None:
    shown = CliRunner().invoke(app, ["papers"])
    assert shown.exit_code == 0
    for name, rows in MECHANISMS.items():
        assert name in shown.stdout and rows[0].name.split(" (")[0][:12] in shown.stdout
    assert "](" not in shown.stdout
    one = CliRunner().invoke(app, ["papers", "flexgen"]).stdout
    assert "--policy" in one and "HybridServe" not in one
    wrong = CliRunner().invoke(app, ["papers", "vllm"])
    assert wrong.exit_code == 2 and "no paper has 'vllm'" in wrong.stderr
