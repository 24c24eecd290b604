"""Rows of a file of prompts: JSON lines or a JSON array, CSV, TSV, Parquet, or a data set that `datasets` saved."""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forebay.rewriter.ir.files import read_input
from forebay.rewriter.ir.printable import PrintableError

PROMPT_NAMES = ("prompt", "messages")  # where no column is named
SAVED = "state.json"  # of a data set, which is a folder
MANY_SAVED = "dataset_dict.json"
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
CSV_FIELD_NBYTES = 1 << 24


class TableError(PrintableError, ValueError):
    """A file of prompts that cannot be read; the message says what to do."""


Columns = dict[str, Any] | str  # of a row; or in words why it has none
TableRow = tuple[int, Columns]  # by its number from 1


def open_table(path: str | Path, column: str | None = None) -> Iterator[tuple[int, str, Columns]]:
    """Return the rows of a file of prompts, whose kind its name's ending says: number, "line" or "row", columns.

    Args:
        path: A file of JSON lines or one JSON array, `.csv`, `.tsv` or `.parquet`, or the folder of a saved data set.
        column: The column with the prompts, which becomes `prompt`, or `messages` where it holds lists.

    Raises:
        TableError: It cannot be read, or has no such column.
        OSError: The system refuses it.
    """
    path = Path(path)
    read = _folder if path.is_dir() else READERS.get(path.suffix.lower())
    if read is None:
        text = read_input(path).removeprefix(codecs.BOM_UTF8)
        entries = _json_array(text)
        unit, rows = ("line", _json_lines(text, path)) if entries is None else ("row", enumerate(entries, start=1))
        return ((number, unit, columns) for number, columns in _named_in_lines(rows, column))
    return ((number, "row", columns) for number, columns in _named(_readable(read, path), column, path))


def _readable(read: Callable[[Path], Iterator[TableRow]], path: Path) -> Iterator[TableRow]:
    """The rows that `read` finds. TableError for whatever it meets in a file that is none of its kind."""
    try:
        yield from read(path)
    except (OSError, TableError):
        raise
    except (ValueError, KeyError, TypeError) as error:  # of pyarrow, all are ValueErrors or KeyErrors
        raise TableError(f"{path} is no such table: {error}") from error


def _json_array(text: bytes) -> list[Columns] | None:
    """The entries of a file that is one array; None for any other."""
    if text.lstrip()[:1] != b"[":
        return None
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return [_as_columns(each) for each in entries]


def _json_lines(text: bytes, path: Path) -> Iterator[TableRow]:
    """Each line's entry. TableError where the first is none, and the name does not say that there are any."""
    first = True
    for number, raw in enumerate(text.split(b"\n"), start=1):
        if raw.strip():
            columns = _parsed(raw)
            if first and isinstance(columns, str) and path.suffix.lower() not in JSON_SUFFIXES:
                raise TableError(f'{path} is {columns}; a line is an object such as {{"prompt": "..."}}, and names of '
                                 f"tables end with {', '.join(READERS)}")
            first = False
            yield number, columns


def _parsed(raw: bytes) -> Columns:
    try:
        entry = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"not UTF-8: {error.reason} at byte {error.start}"
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    return _as_columns(entry)


def _as_columns(entry: Any) -> Columns:
    if isinstance(entry, dict):
        return entry
    return f'expected an object such as {{"prompt": "..."}}, found {type(entry).__name__}'


def _named_in_lines(rows: Iterable[TableRow], column: str | None) -> Iterator[TableRow]:
    """Rows that each have columns of their own."""
    for number, columns in rows:
        if column is None or isinstance(columns, str):
            yield number, columns
        else:
            yield number, _as_prompt(columns, column) if column in columns else f"it has no field {column!r}"


def _named(rows: Iterator[TableRow], column: str | None, path: Path) -> Iterator[TableRow]:
    """Rows of a table, whose first tells where the prompts are. TableError where they are nowhere."""
    for number, columns in rows:
        if isinstance(columns, dict):
            if column is None:
                column = next((name for name in PROMPT_NAMES if name in columns), None)
            if column not in columns:
                wanted = "no column `prompt` or `messages`" if column is None else f"no column {column!r}"
                raise TableError(f"{path} has {wanted}; name one of {', '.join(map(repr, columns))} with --column")
            columns = _as_prompt(columns, column)
        yield number, columns


def _as_prompt(columns: dict[str, Any], column: str) -> dict[str, Any]:
    """The columns; `column` becomes the question, and no other one may be it."""
    value = columns[column]
    others = {name: v for name, v in columns.items() if name not in (column, *PROMPT_NAMES)}
    return {"messages" if isinstance(value, list) else "prompt": value} | others


def _csv(path: Path, delimiters: str) -> Iterator[TableRow]:
    """Cells apart by the first of the delimiters that the first row has."""
    try:
        text = read_input(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TableError(f"{path} is not UTF-8: {error.reason} at byte {error.start}; save it as UTF-8") from error
    names_line = text.partition("\n")[0]
    delimiter = next((each for each in delimiters if each in names_line), delimiters[0])
    before = csv.field_size_limit(CSV_FIELD_NBYTES)
    try:
        table = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        names = next(table, [])
        if len(set(names)) < len(names):
            raise TableError(f"{path} names a column twice in its first row: {', '.join(names)}")
        for number, cells in enumerate((cells for cells in table if cells), start=1):
            if len(cells) != len(names):
                yield number, f"{len(cells)} cells where the first row names {len(names)} columns"
            else:
                yield number, _numbers(dict(zip(names, cells, strict=True)))
    except csv.Error as error:
        raise TableError(f"{path} is no table: {error}") from error
    finally:
        csv.field_size_limit(before)


def _numbers(columns: dict[str, Any]) -> dict[str, Any]:
    """Columns of text, in which the limit of an answer is a number or absent, and empty ids are absent."""
    limit = columns.get("max_new_tokens", "").strip()
    if limit.isascii() and limit.isdigit():
        columns["max_new_tokens"] = int(limit)
    return {name: v for name, v in columns.items() if v or name not in ("id", "max_new_tokens")}


def _parquet(path: Path) -> Iterator[TableRow]:
    with _needing_pyarrow(path):
        from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        yield from _batches(file.iter_batches())


def _folder(path: Path) -> Iterator[TableRow]:
    if (path / MANY_SAVED).is_file():
        parts = sorted(each.name for each in path.iterdir() if each.is_dir())
        raise TableError(f"{path} holds several data sets; name one of them: {', '.join(str(path / p) for p in parts)}")
    if not (path / SAVED).is_file():
        raise TableError(f"{path} is a folder without a saved data set; name a file, or a folder that "
                         "`save_to_disk` of the library datasets wrote")
    state = json.loads(read_input(path / SAVED))
    files = [path / Path(part["filename"]).name for part in state["_data_files"]]
    if state.get("_indices_data_files"):
        raise TableError(f"{path} was saved by an old release of datasets, with rows chosen by number; save it again")
    yield from _batches(batch for file in files for batch in _stream(file))


def _stream(path: Path) -> Iterator[Any]:
    with _needing_pyarrow(path):
        from pyarrow.ipc import open_stream

    with path.open("rb") as file, open_stream(file) as stream:
        yield from stream


def _batches(batches: Iterable[Any]) -> Iterator[TableRow]:
    rows = (row for batch in batches for row in batch.to_pylist())
    for number, row in enumerate(rows, start=1):
        absent = [name for name in ("id", "max_new_tokens") if row.get(name) is None]
        yield number, {name: v for name, v in row.items() if name not in absent}


@contextmanager
def _needing_pyarrow(path: Path) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise TableError(f'{path} needs the library pyarrow; pip install "forebay[data]"') from error


READERS: dict[str, Callable[[Path], Iterator[TableRow]]] = {
    ".csv": lambda path: _csv(path, ",;\t"), ".tsv": lambda path: _csv(path, "\t"), ".parquet": _parquet}


def carried(columns: dict[str, Any], asked: Collection[str], own: Collection[str]) -> dict[str, Any]:
    """The columns that an answer repeats, those that are not `asked`. What has a name of the answer's `own` is named
    anew, and values without a form in JSON are text."""
    plain: dict[str, Any] = json.loads(json.dumps({
        f"input_{name}" if name in own else name: v for name, v in columns.items() if name not in asked}, default=str))
    return plain
