"""README and docs: links lead on, and the site has every page and command. `e2e/test_documented.py` runs their code."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from typer.main import get_command

from forebay.commands.app import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", *sorted(ROOT.glob("docs/*.md"))]


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


def programs(text: str) -> list[str]:
    """Each MODULE of `python -m MODULE` and FILE of `python FILE` in a page's code that is ours."""
    ours = r"(?<![\w-])python (?:-m )?((?:benchmarks|tests|examples|forebay)[\w./]*)"
    return re.findall(rf"^    .*?{ours}", text, re.MULTILINE)


def test_programs_of_the_pages_exist() -> None:
    named = [name for page in PAGES for name in programs(page.read_text(encoding="utf-8"))]
    assert len(named) > 20
    for name in named:
        path = ROOT / (name if name.endswith(".py") else name.replace("forebay.", "src/forebay/").replace(".", "/"))
        assert path.exists() or path.with_suffix(".py").exists(), name


def test_make_targets_of_the_pages_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named: set[Path | str] = set()
    for page in PAGES:
        named |= set(re.findall(r"^    make ([\w-]+)|`make ([\w-]+)`", page.read_text(encoding="utf-8"), re.MULTILINE))
    targets = {name for pair in named for name in pair if name}
    assert {"test", "docs", "wheel"} <= targets
    made = {name for line in re.findall(r"^([\w -]+):(?!=)", makefile, re.MULTILINE) for name in line.split()}
    assert targets <= made | {"test-latest", "test-oldest"}


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and MkDocs make them."""
    titles = re.findall(r"^#+ +(.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
