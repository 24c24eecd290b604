"""The command line of a benchmark, the table that it prints, and the file of what it measured."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any


def arguments(doc: str | None, cases: Iterable[str] = (), **options: tuple[Any, str]) -> argparse.Namespace:
    """What the command line says: one of the cases, the first by default, and the options.

    Args:
        doc: The module's docstring.
        cases: Names that a positional argument may have.
        options: By name a default, or a type where there is none, and the help. A flag is False by default; with the
            type bool it is None unless it is given. Values of a list are separated by commas.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if names := tuple(cases):
        parser.add_argument("case", nargs="?", choices=names, default=names[0])
    for name, (default, text) in {**options, "json": (Path, "file for everything measured")}.items():
        kind, value = (default, None) if callable(default) else (type(default), default)
        how: dict[str, Any] = {"type": listed(type(value[0])) if kind is list else kind, "default": value}
        if value is False or kind is bool:
            how = {"action": "store_true" if value is False else argparse.BooleanOptionalAction}
        parser.add_argument(f"--{name.replace('_', '-')}", help=text, **how)
    return parser.parse_args()


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """The type of an option with commas between its values."""
    return lambda text: [kind(part) for part in text.split(",") if part]


def write_json(args: argparse.Namespace, found: Any) -> None:
    """Write the measurements to the file of `--json`, if it is given."""
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def note(text: str) -> None:
    """Say on standard error how far it is."""
    print(text, file=sys.stderr, flush=True)


def spread(values: Iterable[float], form: str = ".3g") -> str:
    """The median, with the least and the most."""
    ordered = sorted(values)
    middle = f"{median(ordered):{form}}"
    return middle if len(ordered) == 1 else f"{middle} ({ordered[0]:{form}} to {ordered[-1]:{form}})"


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows in Markdown, under the columns that any of them has: texts, or numbers of three digits."""
    head = list(dict.fromkeys(name for row in rows for name, value in row.items() if value != ""))
    lines = [[value if isinstance(value, str) else f"{value:.3g}" for value in (row.get(name, "") for name in head)]
             for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    for line in (head, ["-" * width for width in widths], *lines):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")
