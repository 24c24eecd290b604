"""Which tests `make test` runs: the kind of each by its folder, the cases that stay for `make test-all`, and the files
that take longest.

`make test` runs `pytest -m "not all"`, `make test-all` everything with `FOREBAY_TEST_ALL=1`, which also draws more
random cases. pytest by itself runs everything at the length of `make test`.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
ALL = os.environ.get("FOREBAY_TEST_ALL") == "1"
OTHER_PROCESSOR = "FOREBAY_TEST_PROCESSOR" in os.environ  # kernels/test_processors.py
KINDS = {
    "static": "capture, passes, planning, proofs, predictions and pages: no model is run",
    "kernel": "one operator or one part of the runtime against a reference",
    "e2e": "whole models, commands and servers, against transformers or torch",
    "peer": "another program or library reads what we write, or runs the same",
    "fault": "calls that fail, damaged files, lost power, ranks that die",
    "all": "make test-all only",
}
# The longest path that a test's file lies under gives its kind; a mark on the test itself counts before it.
KIND_OF_PATH = {
    "": "static", "kernels": "kernel", "runtime": "kernel", "runtime/run": "e2e", "compiled": "e2e", "e2e": "e2e",
    "commands": "e2e", "serving": "e2e", "extending": "e2e", "benchmarks": "e2e", "test_examples.py": "e2e",
    "test_drafts_seen.py": "e2e", "exported": "peer", "huggingface": "peer",
    "faults": "fault", "runtime/comm/test_failures.py": "fault"}
# Tests of passes, of every family and of every schedule: whatever they put through a pass must leave sound graphs.
CHECKED = ("passes", "rewriter/capture", "extending", "test_pages.py", "e2e/test_families.py",
           "e2e/test_every_schedule.py")
DURATIONS = TESTS / "durations.json"  # seconds of each file of `make test`, which `make durations` writes
Cell = tuple[Any, ...]


def kind_of(path: Path) -> str:
    """The kind of the tests of a file."""
    inner = path.relative_to(TESTS)
    under = (str(parent) for parent in (inner, *inner.parents[:-1]))
    return next((KIND_OF_PATH[each] for each in under if each in KIND_OF_PATH), KIND_OF_PATH[""])


def checks_graphs(path: Path) -> bool:
    """Whether each pass checks the graphs that it leaves while tests of a file run."""
    return any(path.is_relative_to(TESTS / each) for each in CHECKED)


def read_durations() -> dict[str, float]:
    """Seconds by file, relative to the folder of tests."""
    return json.loads(DURATIONS.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def refuse_parts(option: Any, args: Sequence[str]) -> None:
    """UsageError where a run that notes durations takes other tests of a file than `make test`."""
    if option.markexpr != "not all" or option.keyword or getattr(option, "lf", False) or any("::" in a for a in args):
        raise pytest.UsageError('--write-durations notes what whole files take of make test: give -m "not all", files '
                                "and folders alone, and no -k")


class Durations:
    """Adds up what each file takes, and merges it into `path` at the end: files that did not run, in which a test
    failed, or that were interrupted keep what they have."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0].removeprefix("tests/")
        self.seconds[file] = self.seconds.get(file, 0.0) + report.duration
        if report.failed:
            self.failed.add(file)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        found = {file: round(seconds, 1) for file, seconds in self.seconds.items() if file not in self.failed}
        known = json.loads(self.path.read_text(encoding="utf-8"))
        merged = {file: seconds for file, seconds in (known | found).items() if (TESTS / file).is_file()}
        self.path.write_text(json.dumps(merged, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def longest_first(items: list[pytest.Item]) -> None:
    """Order whole files by their seconds, those that nobody measured first: else the last that a worker is given may
    be a long one, which it still runs while the others have nothing left."""
    seconds = read_durations()

    def key(item: pytest.Item) -> float:
        return -seconds.get(str(item.path.relative_to(TESTS)), float("inf"))

    items.sort(key=key)


def examples(count: int) -> int:
    """Random cases of a property: all in `make test-all`, a fifth of them in `make test`."""
    return count if ALL else max(15, count // 5)


def at_length(*case: Any) -> Any:
    """A case for `parametrize` that runs in `make test-all` only."""
    return pytest.param(*case, marks=pytest.mark.all)


def without(cases: Iterable[Any], left: Iterable[Any]) -> list[Any]:
    """All `cases` for `parametrize`; those that are `left` run in `make test-all` only. A new case runs in both."""
    every, named = list(cases), list(left)
    strange = [case for case in named if case not in every]
    assert named and len(named) < len(every) and not strange, f"cases that are none of all: {strange}"
    return [at_length(*(case if isinstance(case, tuple) else (case,))) if case in named else case for case in every]


def mark_uncovered(items: Sequence[pytest.Item]) -> None:
    """Leave cases of tests that are marked `covering(strength)` to `make test-all`. `make test` runs cases that have
    each value of any parameter (strength 1), or each pair of values (strength 2); of kernels for another processor each
    value."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("covering") and not item.get_closest_marker("all"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in cases.values():
        mark = of_test[0].get_closest_marker("covering")
        assert mark is not None
        cells = [tuple(map(repr, item.callspec.params.values())) for item in of_test]  # type: ignore[attr-defined]
        chosen = covering(cells, 1 if OTHER_PROCESSOR else mark.args[0])
        for i, item in enumerate(of_test):
            if i not in chosen:
                item.add_marker("all")


def covering(cells: Sequence[Cell], strength: int) -> list[int]:
    """The slots of some cells, among which each `strength` values that any cell has together stand together."""
    def parts(cell: Cell) -> set[Any]:
        return set(itertools.combinations(enumerate(cell), min(strength, len(cell))))

    of_cell = [parts(cell) for cell in cells]
    left, found = set[Any]().union(*of_cell), []
    while left:
        found.append(max(range(len(cells)), key=lambda i: len(of_cell[i] & left)))
        left -= of_cell[found[-1]]
    return sorted(found)
