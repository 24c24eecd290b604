"""The command line of a benchmark, and the file of what it measured."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def arguments(doc: str | None, cases: Iterable[str] = (), **options: tuple[Any, str]) -> argparse.Namespace:
    """What the command line says: one of the cases, the first by default, and the options.

    Args:
        doc: The module's docstring.
        cases: Names that a positional argument may have.
        options: By name a default, or a type where there is none, and the help. A flag is False by default.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if names := tuple(cases):
        parser.add_argument("case", nargs="?", choices=names, default=names[0])
    for name, (default, text) in {**options, "json": (Path, "file for everything measured")}.items():
        kind, value = (default, None) if isinstance(default, type) else (type(default), default)
        how: dict[str, Any] = {"action": "store_true"} if value is False else {"type": kind, "default": value}
        parser.add_argument(f"--{name.replace('_', '-')}", help=text, **how)
    return parser.parse_args()


def write_json(args: argparse.Namespace, found: Any) -> None:
    """Write what was found, where a file is asked for."""
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def numbers(text: str) -> list[float]:
    """Numbers with commas between them."""
    return [float(part) for part in text.split(",")]
