"""`forebay papers`: the mechanisms of five papers that run here, and their options."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from forebay.commands.mechanisms import MECHANISMS
from forebay.commands.options import DebugOption
from forebay.commands.terminal import clean_errors

BEGIN, END = "<!-- from src/forebay/commands/mechanisms.py: make papers -->\n", "## Published results, predicted"
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


def papers_command(
    paper: Annotated[str, typer.Argument(metavar="[PAPER]", help="Part of a paper's name. Default: all five.")] = "",
    commands: Annotated[bool, typer.Option("--commands", help="A command for each mechanism, and no table.")] = False,
    debug: DebugOption = False,
) -> None:
    """List the mechanisms of five papers that run here, with their options and figures."""
    with clean_errors(debug):
        from rich.console import Console
        from rich.table import Table

        from forebay.rewriter.ir.plan import PlanError

        found = {name: rows for name, rows in MECHANISMS.items() if paper.lower() in name.lower()}
        if not found:
            raise PlanError(f"no paper has {paper!r} in its name; they are {', '.join(MECHANISMS)}")
        if commands:
            print("mkdir -p out", *(row.command for rows in found.values() for row in rows), sep="\n")
            return
        console = Console(soft_wrap=False, width=None if sys.stdout.isatty() else 160)
        for name, rows in found.items():
            table = Table(title=name, title_justify="left", title_style="bold", show_lines=True)
            for head in ("Mechanism (section)", "Turned on by", "Figure", "Not there"):
                table.add_column(head, overflow="fold")
            for row in rows:
                table.add_row(*map(_plain, (row.name, row.option, row.figure, row.absent)))
            console.print(table)


def _plain(text: str) -> str:
    """Markdown without links and code marks, for a table of rich."""
    from rich.markup import escape

    return escape(_LINK.sub(r"\1", text).replace("`", ""))


def page_part() -> str:
    """The tables as docs/papers.md has them."""
    parts = []
    for name, rows in MECHANISMS.items():
        lines = [f"| {' | '.join((row.name, row.option, row.shown, row.figure, row.absent))} |".replace("  |", " |")
                 for row in rows]
        head = "| Mechanism (section) | Turned on by | Shown by | Figure | Not there |"
        parts.append("\n".join([f"### {name}", "", head, "|---|---|---|---|---|", *lines, "",
                                "| Mechanism (section) | Command |", "|---|---|",
                                *(f"| {row.name} | `{row.command}` |" for row in rows), ""]))
    return "\n".join(parts)


def write_page(page: Path) -> None:
    """Write the tables into the page, between the lines that mark them."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest[rest.index(END):]
    page.write_text(f"{before}{BEGIN}\n{page_part()}\n{after}", encoding="utf-8")


if __name__ == "__main__":
    write_page(Path(sys.argv[1]))
