"""The README says what works: its Python runs as it stands, its commands and their options exist, its links lead on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from forebay.commands.app import app

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_python_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 3
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    names["lm"].close()
    said = capsys.readouterr().out
    assert "The capital of France is Paris" in said and "schedule" in said and "torch.Size([4, 1024])" in said


def test_its_commands_and_their_options_exist() -> None:
    known = get_command(app).commands  # type: ignore[attr-defined]
    lines = re.findall(r"^    forebay +([\w-]+)(.*?)(?:  #.*)?$", TEXT, re.MULTILINE)
    assert len(lines) > 10 and {"run", "chat", "plan"} <= {name for name, _ in lines}
    for name, rest in lines:
        options = {option for parameter in known[name].params for option in parameter.opts}
        if name != "eval":  # its options are read when it runs
            assert set(re.findall(r"(?<=\s)--[\w-]+", rest)) <= options, (name, rest)


def test_its_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+?)\)", TEXT)
    assert "docs/measured.md" in links and "docs/step.png" in links
    assert not [link for link in links if not link.startswith("http") and not (ROOT / link).exists()]
