"""What a person reads, as sentences: pages, help texts, docstrings of the public names, messages of errors."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Pages that a command writes, from names of model families and from messages of other packages.
WRITTEN = ("docs/coverage.md",)
LONGEST, MEAN = 30, 18  # words of a sentence
ENDS = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_]*[A-Z0-9§…])")
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|et al|cf|vs|Fig|Eq|No|approx)\.")
# By STYLE: private dialect, British spelling. Each with what to write.
FORBIDDEN = {
    r"beside": "next to, together with, compared with, also", r"behind": "after", r"mend(ed|s|ing)?": "fix",
    r"stood|stands?": "accepted, is", r"looked up": "prompt lookup, read", r"drafts? ahead": "draft-ahead",
    r"told|wished|paced": "given, requested", r"lends?|lent": "shares, overlays", r"hands? on": "sends",
    r"held up": "delayed", r"(is|are) said": "unless given, as named",
    r"prefer(s|red)? nobody": "picks all equally often",
    r"take[sn]? part": "each rank", r"products?": "matmul", r"line up": "enqueue",
    r"gathers? by row": "row gather", r"renewed": "re-prefill", r"whose turn": "the schedule",
    r"\w*(quanti|initiali|optimi|normali|speciali|seriali|summari|synchroni|reali|minimi|maximi|organi|recogni)"
    r"s(e|es|ed|ing|ation)": "-ize", r"colours?|neighbours?|behaviours?|favours?|honou?red|labelled|modelled":
        "American spelling",
}
FORBIDDEN_WORDS = re.compile(rf"\b({'|'.join(FORBIDDEN)})\b", re.IGNORECASE)
NOUN_CLAUSES = re.compile(r"^(Of|That|Where|What)\b")
# Sentences that begin with a clause in place of a noun; questions, and the page "What fits", are none.
CLAUSE_SENTENCES = re.compile(r"^\W*(Of|Those|What(?! fits))\b(?!.*\?)")
# Docstrings that begin with a clause: of modules, classes and properties, and of functions, which begin with a verb.
CLAUSE_DOCSTRINGS = re.compile(r"(All that|As|Of|That|Those|What|Who)\b(?! usual)")
CLAUSE_FUNCTIONS = re.compile(rf"{CLAUSE_DOCSTRINGS.pattern}|(How|When|Where|Whether|Which|Why)\b")
# Clauses in place of a noun, anywhere in a module: "of which what is exchanged", "for what is no answer".
DIALECT = re.compile(r"\b(of which what|of those of which|for what is no|what is no)\b")


def pages() -> list[Path]:
    """Every page but the dated log of measurements, `docs/lab`."""
    named = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "passes/README.md", "benchmarks/README.md")
    return [*(ROOT / name for name in named), *sorted((ROOT / "docs").glob("*.md"))]


def paragraphs(page: str) -> Iterator[str]:
    """The prose of a page: headings, code, tables and comments left out; an item of a list is a paragraph."""
    page = re.sub(r"```.*?```|<!--.*?-->|^---\n.*?\n---\n", "\n", page, flags=re.DOTALL)
    held: list[str] = []
    code = False  # an indented line after a blank one, outside a list, begins code
    listed = False
    before = ""
    for line in [*page.splitlines(), ""]:
        item = re.match(r"\s*([-*+]|\d+\.)\s", line)
        if line.strip() and not line.startswith("    "):
            code = False
            listed = bool(item) or (listed and line.startswith(" "))
        elif line.startswith("    ") and not before.strip() and not listed:
            code = True
        if code or not line.strip() or line.lstrip().startswith(("|", "#", ":::", "![", "!!!", "???")) or item:
            if held:
                yield " ".join(held)
            held = []
        if not (code or line.lstrip().startswith(("|", "#", ":::", "!!!", "???"))) and line.strip():
            held.append(re.sub(r"^\s*([-*+]|\d+\.|>)\s+", "", line).strip())
        before = line


def sentences(text: str) -> list[str]:
    """The sentences of a paragraph; a quotation of code, and a formula, count as one word."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"``.*?``|`[^`]*`", "X", text))
    text = ABBREVIATIONS.sub(lambda found: found[0].replace(".", ""), text)
    return [part.strip() for part in ENDS.split(text) if part.strip()]


def words(sentence: str) -> int:
    """Words of a sentence; signs by themselves are none."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def complaints(text: str) -> list[str]:
    """What is wrong with a paragraph: sentences that are too long, and forbidden words, with what to write."""
    found = []
    for sentence in sentences(text):
        if words(sentence) > LONGEST:
            found.append(f"{words(sentence)} words: {sentence}")
        for match in FORBIDDEN_WORDS.finditer(sentence):
            advice = next(better for word, better in FORBIDDEN.items() if re.fullmatch(word, match[0], re.IGNORECASE))
            found.append(f"{match[0]!r} ({advice}): {sentence}")
    return found


def tables(page: str) -> list[str]:
    """Every table of a page."""
    return re.findall(r"(?:^ *\|.*\n?)+", page, re.MULTILINE)


def exported() -> dict[str, Any]:
    """Public names of `forebay` with their objects, and the public methods and properties of its classes."""
    import forebay

    found: dict[str, Any] = {}
    for name in forebay.__all__:
        value = getattr(forebay, name)
        if callable(value):
            found[name] = value
        if inspect.isclass(value):
            found |= {f"{name}.{member}": held for member, held in vars(value).items()
                      if not member.startswith("_") and (inspect.isfunction(held) or isinstance(
                          held, (property, classmethod, staticmethod, functools.cached_property)))}
    return found


def help_texts() -> Iterator[tuple[str, str]]:
    """Every help text of the command line: of commands, arguments and options."""
    import typer
    from typer.main import get_command

    from forebay.commands.app import app
    from forebay.commands.evaluate import eval_command

    alone = typer.Typer()
    alone.command()(eval_command)
    commands = {**get_command(app).commands, "eval": get_command(alone)}  # type: ignore[attr-defined]
    yield "forebay", app.info.help or ""
    for name, command in commands.items():
        yield name, (command.help or "").partition("\f")[0]
        for parameter in command.params:
            yield f"{name} {parameter.opts[0]}", getattr(parameter, "help", None) or ""


def clause_docstrings() -> Iterator[str]:
    """Docstrings of the package that begin with a clause and not with a verb or a noun, by their place."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = (ast.get_docstring(node) or "").lstrip()
                verb = isinstance(node, ast.FunctionDef) and not any(
                    "property" in ast.unparse(each) for each in node.decorator_list)
                if (CLAUSE_FUNCTIONS if verb else CLAUSE_DOCSTRINGS).match(text):
                    yield f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'the module')}: {text.splitlines()[0]}"


def sources() -> list[Path]:
    """The modules of the package."""
    folders = ("src", "rewriter", "passes", "kernels", "runtime")  # the others are links in src
    return sorted((path for folder in folders for path in (ROOT / folder).rglob("*.py")), key=str)


def messages() -> Iterator[tuple[str, str]]:
    """The text of each error that the package raises, by its place; what is put in counts as one word."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                text = " ".join(_literal(argument) for argument in node.exc.args).strip()
                if text:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def _literal(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)  # type: ignore[misc]
    if isinstance(node, ast.BinOp):
        return _literal(node.left) + _literal(node.right)
    return ""
