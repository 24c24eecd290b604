"""docs/adding.md: each block of code stands in the test that it is said to come from, and each such test is shown."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/adding.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]


def named_tests(text: str) -> set[str]:
    return set(re.findall(r"`(tests/extending/test_\w+\.py)`", text))


def code_of(section: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def missing(section: str) -> list[str]:
    """The blocks of a section that are not in the files that it names, but for how far they are indented. A block of
    imports has, of those of its test, the ones that the section's other blocks use."""
    (test,) = named_tests(section)
    files = [(ROOT / name).read_text(encoding="utf-8").splitlines()
             for name in sorted(set(re.findall(r"`(tests/extending/\w+\.py)`", section)))]
    blocks = code_of(section)
    found = [block for block in blocks if not only_imports(block) and not any(
        textwrap.dedent("\n".join(lines[i : i + block.count("\n")])) == textwrap.dedent(block).rstrip("\n")
        for lines in files for i in range(len(lines)))]
    known = imported((ROOT / test).read_text(encoding="utf-8"))
    used = {node.id for block in blocks if not only_imports(block)
            for node in ast.walk(ast.parse(textwrap.dedent(block)))
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    shown = set().union(*(imported(block) for block in blocks))
    needed = {each for each in known if each[1] in used and each[0].partition(".")[0] != "extending"}
    return found + sorted(f"{module} {name}" for module, name in needed - shown)


def imported(code: str) -> set[tuple[str, str]]:
    """Modules and names of the imports of a file or a block."""
    found = set()
    for node in ast.parse(textwrap.dedent(code)).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(getattr(node, "module", each.name), each.asname or each.name) for each in node.names}
    return found


def only_imports(block: str) -> bool:
    return all(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.parse(textwrap.dedent(block)).body)


def test_blocks_of_code_are_in_the_tests_that_they_come_from() -> None:
    assert len(SECTIONS) >= 5 and all(code_of(section) for section in SECTIONS)
    assert [block for section in SECTIONS for block in missing(section)] == []


def test_a_block_that_is_nowhere_is_seen() -> None:
    assert missing(SECTIONS[0].replace('bind={"cpu"', 'bind={"gpu"'))
    assert missing(SECTIONS[0].replace(", each_once", "")) == ["forebay.kernels.operator each_once"]


def test_each_addition_is_on_the_page_and_in_its_table() -> None:
    made = {f"tests/extending/{path.name}" for path in (ROOT / "tests/extending").glob("test_*.py")}
    table = PAGE.partition("\n## ")[0]
    assert named_tests(table) == made == {test for section in SECTIONS for test in named_tests(section)}


def test_paths_of_the_table_exist() -> None:
    table = PAGE.partition("\n## ")[0]
    paths = [path for path in re.findall(r"`([\w./]+/[\w./]*)`", table) if path == path.lower()]
    assert len(paths) > 8 and [path for path in paths if not (ROOT / path).exists()] == []
