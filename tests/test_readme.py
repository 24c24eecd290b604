"""README and docs: the README's Python runs as it stands, commands and options of all pages exist, links lead on."""

from __future__ import annotations

import importlib.util
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
    assert len(blocks) == 2
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    names["lm"].close()
    said = capsys.readouterr().out
    assert "The capital of France is Paris" in said and "schedule" in said and "torch.Size([4, 1024])" in said


def test_commands_of_all_pages_and_their_options_exist() -> None:
    """Each line of code that begins with `forebay` names a command, and options that it has."""
    known, seen = get_command(app).commands, set()  # type: ignore[attr-defined]
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        for name, rest in re.findall(r"^    (?:torchrun .* )?forebay +([\w-]+)(.*?)(?: +#.*)?$",
                                     page.read_text(encoding="utf-8"), re.MULTILINE):
            seen.add(name)
            options = {option for parameter in known[name].params for option in (*parameter.opts,
                                                                                 *parameter.secondary_opts)}
            if name != "eval":  # its options are read when it runs
                assert set(re.findall(r"(?<=\s)--[\w-]+", rest)) <= options, (page.name, name, rest)
    assert seen >= known.keys() - {"help", "version"}  # each command is shown on some page


def test_links_of_all_pages_lead_somewhere() -> None:
    """Files exist, and headings that a link names do."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "passes/README.md", ROOT / "benchmarks/README.md",
             ROOT / "SECURITY.md",
             *ROOT.glob("docs/**/*.md")]
    seen, broken = 0, []
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if link.startswith(("http:", "https:")):
                continue
            seen += 1
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in headings(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert seen > 80 and not broken


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    """And everything there is a page, but for the one that the site generates."""
    import yaml

    def leaves(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        inner = entry.values() if isinstance(entry, dict) else entry
        return [leaf for each in inner for leaf in leaves(each)]  # type: ignore[attr-defined]

    shown = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("**/*.md")}
    assert len(shown) == len(set(shown)) and set(shown) == pages | {"cli.md"}


def test_the_page_of_options_has_every_command() -> None:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/site_hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = hooks.cli_page()
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert {f"## forebay {name}" for name in commands} <= set(page.splitlines())
    assert "| `--budget` |" in page and "| `--text` | UTF-8 text file" in page and "\f" not in page


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and MkDocs make them."""
    titles = re.findall(r"^#+ +(.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
