"""Pages, help texts, public docstrings and messages of errors keep the rules of CONTRIBUTING.md: short sentences, the
field's words. `python tests/test_words.py` prints every offender."""

from __future__ import annotations

import inspect
import re
import statistics
from collections import Counter

import pytest
from words import (
    CLAUSE_SENTENCES,
    DIALECT,
    LONGEST,
    MEAN,
    NOUN_CLAUSES,
    ROOT,
    WRITTEN,
    clause_docstrings,
    complaints,
    exported,
    help_texts,
    messages,
    pages,
    paragraphs,
    sentences,
    sources,
    tables,
    words,
)


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in pages()])
def test_pages(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [] if page in WRITTEN else [each for part in paragraphs(text) for each in complaints(part)]
    assert not found, "\n".join(found)
    clauses = [each for part in paragraphs(text) for each in sentences(part) if CLAUSE_SENTENCES.match(each)]
    assert page in WRITTEN or not clauses, "\n".join(clauses)
    mixed = [table for table in tables(text) if re.search(r"\bMB\b", table) and re.search(r"\bMiB\b", table)]
    assert not mixed, "MB and MiB in one table"


def test_the_mean_sentence_of_the_pages_is_short() -> None:
    texts = [page.read_text(encoding="utf-8") for page in pages()
             if page.parent.name == "docs" or page == ROOT / "README.md"]
    lengths = [words(sentence) for text in texts for part in paragraphs(text) for sentence in sentences(part)]
    assert len(lengths) > 500 and statistics.mean(lengths) <= MEAN


def test_help_texts() -> None:
    texts = list(help_texts())
    assert len(texts) > 100
    found = [f"{name}: {each}" for name, text in texts for each in complaints(text)]
    assert not found, "\n".join(found)
    clauses = [f"{name}: {text}" for name, text in texts if NOUN_CLAUSES.match(text)]
    assert not clauses, "\n".join(clauses)
    assert not [name for name, text in texts if not text.strip() and not name.endswith("--help")]


def test_public_docstrings() -> None:
    fields = re.compile(r"\n\s*(?=\w+( \([^\n]*\))?: )")  # each field and argument is a paragraph of its own
    documented = {name: fields.sub("\n\n", inspect.getdoc(value) or "") for name, value in exported().items()}
    assert len(documented) > 30
    assert not [name for name, text in documented.items() if not text]
    found = [f"{name}: {each}" for name, text in documented.items() for part in paragraphs(text)
             for each in complaints(part)]
    assert not found, "\n".join(found)


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    clauses = list(clause_docstrings())
    assert not clauses, "\n".join(clauses)


def test_modules_name_things_and_not_clauses() -> None:
    found = [f"{path.relative_to(ROOT)}: {match[0]}" for path in sources()
             for match in DIALECT.finditer(path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_messages_of_errors() -> None:
    found = [f"{place}: {each}" for place, text in messages() for each in complaints(text)]
    assert sum(1 for _ in messages()) > 600
    assert not found, "\n".join(found)


LONG = "It is " + "very " * LONGEST + "long."


@pytest.mark.parametrize(("page", "expected"), [
    ("A short one. Another. `a b c d` is code.", 0),
    (LONG, 1), (f"- {LONG}\n- short", 1), (f"1. {LONG}", 1),
    ("It is " + "very " * 14 + "long.\nIt is " + "very " * 14 + "long.", 0),  # two sentences of a paragraph
    ("one " * 20 + "\n\n" + "two " * 20, 0), ("one " * 20 + "\n- " + "two " * 20, 0),  # no full stop, two paragraphs
    (f"text\n\n    {LONG}\n", 0), (f"```\n{LONG}\n```", 0), (f"| a | {LONG} |", 0), (f"# {LONG}", 0),
    (f"- a\n\n    {LONG}", 1),  # within an item of a list an indented line is text
    ("It was mended beside the stand.", 3), ("The colour of a neighbour's behaviour.", 3), ("`beside` is a name.", 0),
])
def test_what_is_complained_about(page: str, expected: int) -> None:
    assert sum(len(complaints(part)) for part in paragraphs(page)) == expected


if __name__ == "__main__":
    every = {str(page.relative_to(ROOT)): [each for part in paragraphs(page.read_text(encoding="utf-8"))
                                           for each in complaints(part)] for page in pages()}
    every["help"] = [f"{name}: {each}" for name, text in help_texts() for each in complaints(text)]
    every["messages"] = [f"{place}: {each}" for place, text in messages() for each in complaints(text)]
    for name, complained in every.items():
        print(name, Counter(each[0] == "'" for each in complained), *complained, sep="\n    ")
