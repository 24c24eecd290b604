"""What docs/architecture.md and docs/debugging.md quote of one graph's stages is what examples/one_graph.py makes."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.kernels.cpu_support import native
from forebay.rewriter.ir.program import Program, Wait
from forebay.rewriter.pipeline import step_pipeline as pipeline
from forebay.rewriter.verify.program import ProgramError, verify_program

ROOT = Path(__file__).parents[1]
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
DEBUGGING = (ROOT / "docs/debugging.md").read_text(encoding="utf-8")
# where in each page the quoted blocks stand
QUOTED = {"architecture.md": (ARCHITECTURE, "## One graph through every stage", "Values without room on the device go"),
          "debugging.md": (DEBUGGING, "A graph is one node per line", "Read it as follows.")}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Mapping[str, str], Program]:
    """The files that the example writes, and its Program of a decode step, with our kernels: pages are of these."""
    folder, proved = tmp_path_factory.mktemp("dumps"), {}
    spec = importlib.util.spec_from_file_location("one_graph", ROOT / "examples/one_graph.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "load", lambda: object())
        patch.setattr(pipeline, "verify_program", lambda program, budget: proved.__setitem__(program.name, program))
        example.main(folder)
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.*")}, proved["step of 1 tokens"]


def blocks(page: str) -> list[list[str]]:
    text, begin, end = QUOTED[page]
    assert text.count(begin) == text.count(end) == 1
    quoted = text[text.index(begin) : text.index(end)]
    return [[line.strip() for line in block.splitlines()] for block in re.findall(r"(?:^    .+\n|^\n(?=    ))+", quoted,
                                                                                 re.MULTILINE) if block.strip()]


def pattern(line: str) -> re.Pattern[str]:
    """What matches a quoted line, but for a gloss behind an arrow: … stands for anything, symbols may have any number,
    and a product any implementation."""
    quoted = re.escape(re.sub(r"\s+", " ", line.split(" ← ")[0]).strip())
    quoted = quoted.replace("…", ".*").replace(r"\(flat\)", r"\(\w+\)")
    return re.compile(re.sub(r"\bs\d+\b", r"s\\d+", quoted))


def shortened(line: str) -> str:
    """A line of a dump without what the pages leave out."""
    for left_out in (r" : \[num_users=\d+\]", r"torch\.ops\.", r"forebay\.rewriter\.ir\.ops\.", r"\.default",
                     r", kwargs = \{\}", r"  by \w+", r"  # $"):
        line = re.sub(left_out, "", line)
    line = re.sub(r"placeholder\[target=\w+\]", "placeholder", re.sub(r"call_function\[target=([\w.]+)\]", r"\1", line))
    return re.sub(r"\s+", " ", line).strip()


def quotes(block: list[str], dump: str) -> bool:
    """Whether the lines of a block follow one another in a dump, with others between them only at a … of its own."""
    found = [[re.sub(r"\s+", " ", line).strip(), shortened(line)] for line in dump.splitlines() if line.strip()]
    at, gap = 0, True
    for line in (line for line in block if line):
        if line == "…":
            gap = True
            continue
        wanted = pattern(line)
        fits = (i for i in range(at, len(found) if gap else min(at + 1, len(found)))
                if any(map(wanted.fullmatch, found[i])))
        place = next(fits, None)
        if place is None:
            return False
        at, gap = place + 1, False
    return True


@pytest.mark.parametrize("page", QUOTED)
def test_pages_quote_what_the_example_makes(page: str, made: tuple[Mapping[str, str], Program]) -> None:
    files, _ = made
    found = blocks(page)
    assert len(found) == {"architecture.md": 8, "debugging.md": 2}[page]
    strange = [block for block in found if not any(quotes(block, dump) for dump in files.values())]
    assert strange == []


def test_a_wrong_quotation_is_seen(made: tuple[Mapping[str, str], Program]) -> None:
    dump = made[0]["1_tokens/program.txt"]
    lines = [line for line in dump.splitlines() if line][4:9]
    assert quotes(lines, dump) and quotes([lines[0], "…", lines[3]], dump)
    assert not quotes([lines[0], lines[3]], dump) and not quotes(lines[::-1], dump)
    assert not quotes([lines[0].replace("1", "7")], dump) and not quotes([lines[0][:-1]], dump)


def test_errors_of_the_proof_are_worded_as_the_page_says(made: tuple[Mapping[str, str], Program]) -> None:
    _, program = made
    told = [re.sub(r"\s+", " ", text).strip() for text in re.findall(r"ProgramError: ((?:.+\n)+)", DEBUGGING)]
    waits = [tuple(found) for found in re.findall(r"`(\w+) wait event (\d)`", DEBUGGING)]
    assert len(told) == len(waits) == 3
    for message, (stream, event) in zip(told, waits, strict=True):
        step = [item for item in program.step
                if not (isinstance(item, Wait) and (item.stream, str(item.event)) == (stream, event))]
        with pytest.raises(ProgramError) as caught:
            verify_program(replace(program, step=tuple(step)), {"device": 910_000, "host": None})
        assert str(caught.value) == message


def test_security_names_tests_that_there_are() -> None:
    """`::test_…` alone is of the file that was named last."""
    seen, file = 0, ROOT
    for quoted in re.findall(r"`([^`]+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8")):
        path, _, name = quoted.partition("::")
        file = ROOT / path if path.startswith("tests/") else file
        if path.startswith("tests/"):
            assert file.exists(), quoted
        if name:
            seen += 1
            assert re.search(rf"^def {name}\(", file.read_text(encoding="utf-8"), re.MULTILINE), quoted
    assert seen > 12


def test_every_recorded_result_is_named() -> None:
    """By a page or by a script that reads it; names may hold * and {a,b}, and a name may be broken into two lines."""
    texts = "\n".join(path.read_text() for path in (*ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.py")))
    names = {"".join(name.split()) for name in re.findall(r"[\w.*{},-]+(?:-\n +[\w.*{},-]+)?\.json", texts)}
    known = []
    for name in names:
        pattern = re.escape(name).replace(r"\*", ".*")
        known.append(re.sub(r"\\\{(.*?)\\\}", lambda m: f"({m[1].replace(',', '|')})", pattern))
    unnamed = [path.name for path in ROOT.glob("benchmarks/results/*.json")
               if not any(re.fullmatch(each, path.name) for each in known)]
    assert len(known) > 40 and not unnamed, f"results that no page and no script names: {unnamed}"


def test_the_commands_of_benchmarks_that_pages_name_exist() -> None:
    """Each `benchmarks.NAME` is a module with the options that follow it; fields of its cases are options, too."""
    pages = (*ROOT.glob("docs/**/*.md"), ROOT / "README.md", *ROOT.glob("*/*/README.md"))
    commands = [" ".join(quoted.split()) for page in pages
                for one, other in re.findall(r"`([^`]+)`|^    (python -m benchmarks.*)$",
                                             page.read_text(encoding="utf-8"), re.MULTILINE)
                for quoted in (one or other,)]
    found = [named for command in commands if (named := re.match(r"(?:.* -m )?benchmarks\.(\w+)(.*)", command))]
    unknown = []
    for name, options in (named.groups() for named in found):
        file = next((path for path in (ROOT / f"benchmarks/{name}.py", ROOT / f"benchmarks/{name}/__main__.py")
                     if path.exists()), None)
        asked = [option.removeprefix("no-").replace("-", "[-_]") for option in re.findall(r"--([a-z][\w-]*)", options)]
        if file is None or not all(re.search(rf"\b{option}\b", file.read_text()) for option in asked):
            unknown.append(f"{name}{options}")
    assert len(found) > 30 and not unknown


def test_files_that_pages_name_exist() -> None:
    """A path in quotation is a file below the root, or the end of one: pages follow when a file gets another name."""
    files = {str(path.relative_to(ROOT)) for folder in ("rewriter", "passes", "kernels", "runtime", "src", "tests",
                                                        "examples", "benchmarks", "docs")
             for path in (ROOT / folder).rglob("*.*")}
    pages = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "passes/README.md", *ROOT.glob("docs/*.md"))
    named = {(page.name, path) for page in pages
             for path in re.findall(r"`([a-z_][\w./-]*\.(?:py|h|cpp|sh))`", page.read_text(encoding="utf-8"))}
    ends = {"/".join(file.split("/")[i:]) for file in files for i in range(file.count("/") + 1)}
    others = {"verb_noun.py", "test_verb_noun.py",  # a pattern
              "tests/generation/test_utils.py", "launch.sh"}  # transformers' own, what serve-plan writes
    assert len(named) > 80 and not [each for each in sorted(named) if each[1] not in ends | others]
