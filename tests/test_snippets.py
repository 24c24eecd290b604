"""Code of the pages beside `forebay` commands: Python compiles and names what exists, and programs are there.

`test_readme.py` runs the README's Python and checks the options of `forebay` commands; here nothing runs."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from words import ROOT

import forebay
from forebay.rewriter.planning.options import OPTIONS

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", *sorted(ROOT.glob("docs/*.md"))]
BEGINS = re.compile(r"(import |from \w+ import |lm = |lm\.|with wrap|said = |forebay\.\w+\()")
WRAPPED = (forebay.LanguageModel, forebay.Embedder, forebay.Reranker, forebay.EncoderDecoder)
SHAPES = ("prompt", "new_tokens", "batch")


def python_blocks(text: str) -> Iterator[str]:
    """Fenced Python, and indented blocks that begin like Python; `…` becomes a name."""
    fenced = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    indented = (block for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", plain, re.MULTILINE)
                if BEGINS.match(block.strip()))
    for block in (*fenced, *indented):
        yield re.sub(r"…", "more", re.sub(r"\(…\)|…, ?|, ?…", lambda found: "(**more)" if found[0][0] == "(" else "",
                                          textwrap.dedent(block)))


def unknown_names(code: str) -> list[str]:
    """What a snippet asks of `forebay`, of a wrapped model, or of `wrap`, that is not there."""
    wrong = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = {"forebay": (forebay,), "lm": WRAPPED, "scorer": WRAPPED}.get(node.value.id, ())
            instance = {name for each in owner for name in re.findall(r"self\.(\w+)", _source(each))}
            if owner and not any(hasattr(each, node.attr) for each in owner) and node.attr not in instance:
                wrong.append(f"{node.value.id}.{node.attr}")
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("wrap", "forebay.wrap"):
            known = {*inspect.signature(forebay.wrap).parameters, *OPTIONS, *SHAPES}
            wrong += [f"wrap({each.arg}=)" for each in node.keywords if each.arg and each.arg not in known]
    return wrong


def _source(owner: object) -> str:
    parts = owner.__mro__[:-1] if isinstance(owner, type) else ()
    return "".join(inspect.getsource(part) for part in parts if part.__module__.startswith("forebay"))


def programs(text: str) -> list[str]:
    """Each MODULE of `python -m MODULE` and FILE of `python FILE` in a page's code that is ours."""
    ours = r"(?<![\w-])python (?:-m )?((?:benchmarks|tests|examples|forebay)[\w./]*)"
    return re.findall(rf"^    .*?{ours}", text, re.MULTILINE)


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PAGES])
def test_python_of_a_page_compiles_and_names_what_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for code in python_blocks(text) if page != "docs/adding.md" else ():  # of which test_adding.py has the tests
        assert not unknown_names(code), f"{unknown_names(code)} in\n{code}"


def test_programs_of_the_pages_exist() -> None:
    for name in (name for page in PAGES for name in programs(page.read_text(encoding="utf-8"))):
        path = ROOT / (name if name.endswith(".py") else name.replace("forebay.", "src/forebay/").replace(".", "/"))
        assert path.exists() or path.with_suffix(".py").exists(), name


def test_what_is_seen() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert sum(len(list(python_blocks(text))) for text in texts) > 15
    assert sum(len(programs(text)) for text in texts) > 20
    code = "lm.explained()\nlm.explain()\nforebay.wrap(m, '1GB', bath=2, batch=2)\nforebay.wrapped"
    assert sorted(unknown_names(code)) == ["forebay.wrapped", "lm.explained", "wrap(bath=)"]


def test_make_targets_of_the_pages_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named: set[Path | str] = set()
    for page in PAGES:
        named |= set(re.findall(r"^    make ([\w-]+)|`make ([\w-]+)`", page.read_text(encoding="utf-8"), re.MULTILINE))
    targets = {name for pair in named for name in pair if name}
    assert {"test", "docs", "wheel"} <= targets
    made = {name for line in re.findall(r"^([\w -]+):(?!=)", makefile, re.MULTILINE) for name in line.split()}
    assert targets <= made | {"test-latest", "test-oldest"}
