"""`forebay papers` and the page have one list, whose options are those of the commands."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
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


def test_each_mechanism_has_a_command_that_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user enters it: our own by the parser of the command, the benchmarks' modules by their name."""
    monkeypatch.chdir(ROOT)
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    shown = CliRunner().invoke(app, ["papers", "--commands"]).stdout.splitlines()[1:]
    assert len(shown) == sum(map(len, MECHANISMS.values()))
    for words in (shlex.split(part) for line in shown for part in line.split("&&")):
        if words[:2] == ["python", "-m"]:
            assert find_spec(words[2]), words
            continue
        start = words.index("forebay")
        assert words[:start] in ([], ["torchrun", "--nproc-per-node=2", "--no-python"])
        command, *rest = words[start + 1:]
        assert commands[command].make_context(command, rest)


@pytest.mark.all
def test_commands_of_exact_mechanisms_give_the_same_answers(tmp_path: Path) -> None:
    """Tokens of one process within a budget, of policies, checkpoints and ranks."""
    jobs = [row.command for rows in MECHANISMS.values() for row in rows
            if "run demo" in row.command and not any(
                other in row.command for other in ("kv4", "--kv-blocks", "--temperature"))]
    found = set[str]()
    for job in jobs:
        output = re.search(r"out/\S+\.jsonl", job)
        assert output
        command = job.replace(output[0], str(tmp_path / Path(output[0]).name)).replace("disk=out", f"disk={tmp_path}")
        subprocess.run(command.replace("forebay run", f"{sys.executable} -m forebay run"), shell=True, check=True,
                       cwd=ROOT, env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
        found.add((tmp_path / Path(output[0]).name).read_text(encoding="utf-8"))
    assert len(jobs) > 10 and len(found) == 1


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
