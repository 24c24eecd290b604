"""`forebay allocate FILE.csv`: the static allocator by itself, on buffers whose lifetimes a file gives."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.commands.terminal import FAILED, clean_errors, console, say

if TYPE_CHECKING:
    from forebay.passes.allocators import Allocation

DOES_NOT_FIT = 3  # exit code: the best allocation found is higher than the capacity


def allocate(
    file: Annotated[Path, typer.Argument(metavar="FILE.csv",
        help="CSV file of buffers, with columns id,lower,upper,size: live in [lower, upper), size in "
             "bytes.")],
    capacity: Annotated[str | None, typer.Option(metavar="BYTES",
        help="Capacity at which the search stops (1048576, 1MiB). Default: the smallest height.")] = None,
    time_limit: Annotated[float | None, typer.Option(min=0, metavar="SECONDS",
        help="Seconds of search. Default: 9 with a capacity, 3 without.")] = None,
    alignment: Annotated[int, typer.Option(min=1, metavar="BYTES", help="Alignment of offsets, in bytes.")] = 1,
    output: Annotated[Path | None, typer.Option(metavar="OUT.csv",
        help="File for the offsets. Default: FILE.offsets.csv in the current folder.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Full tracebacks of errors.")] = False,
) -> None:
    """Assign addresses to buffers of known lifetimes.

    Exit code 3 when nothing was found that fits the capacity; the offsets of the best are written even so.
    """
    with clean_errors(debug):
        from forebay.passes.allocators import allocate as place
        from forebay.passes.allocators import check, lower_bound, read_csv, write_csv
        from forebay.rewriter.ir.byte_sizes import parse_nbytes

        limit = None if capacity is None else parse_nbytes(capacity, "--capacity")
        try:
            buffers = read_csv(file)
        except ValueError as error:  # UnicodeDecodeError too: the file is no text
            say(f"error: {error}" if str(file) in str(error) else f"error: {file}: {error}")
            raise typer.Exit(FAILED) from None
        least = lower_bound(buffers, alignment)
        if limit is not None and limit < least:
            say(f"error: --capacity {limit}: the buffers live at the fullest moment need {least} bytes together, so "
                "nothing fits; give at least that")
            raise typer.Exit(FAILED)
        found = place(buffers, capacity=limit, time_limit_s=time_limit, alignment=alignment)
        check(buffers, found, alignment)
        where = output or Path(f"{file.stem}.offsets.csv")
        write_csv(where, buffers, found.offsets)
        _print(found, len(buffers), limit, where)
        if limit is not None and found.height > limit:
            proved = found.lower_bound > limit
            say(f"no allocation fits {limit} bytes: the search tried all" if proved else
                f"found none that fits {limit} bytes in {found.time_s:.1f} s; a longer --time-limit may")
            raise typer.Exit(DOES_NOT_FIT)


def _print(found: Allocation, buffers: int, capacity: int | None, where: Path) -> None:
    rows = [
        ("buffers", f"{buffers}"),
        ("height", f"{found.height} bytes"),
        ("lower bound", f"{found.lower_bound} bytes"),
        ("ratio", f"{found.height / found.lower_bound:.4f}" if found.lower_bound else "1.0000"),
        *([] if capacity is None else [("capacity", f"{capacity} bytes")]),
        ("seconds", f"{found.time_s:.3f}"),
        ("method", found.method),
        ("offsets", str(where)),
    ]
    if not sys.stdout.isatty():
        for name, value in rows:
            print(f"{name}: {value}")
        return
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    console(stderr=False).print(table)
