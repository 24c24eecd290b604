"""Rows of a reproduced table: what a paper printed, what the model predicts, and the relative error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """One published number beside its prediction. `bound` is the error allowed, None where none is claimed; `note`
    says "fitted" where a constant comes from this row."""

    table: str
    row: str
    unit: str
    paper: float
    predicted: float
    bound: float | None = None
    note: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.paper - 1

    @property
    def holds(self) -> bool:
        return self.bound is None or abs(self.error) <= self.bound


def as_json(rows: Sequence[Row]) -> str:
    return json.dumps([{**asdict(r), "error": r.error, "holds": r.holds} for r in rows], indent=1)


def as_markdown(rows: Sequence[Row]) -> str:
    """One table per published table."""
    lines: list[str] = []
    for table in dict.fromkeys(r.table for r in rows):
        lines += [f"### {table}", "", "| row | unit | paper | predicted | error | bound | |",
                  "|---|---|---:|---:|---:|---:|---|"]
        for r in rows:
            if r.table == table:
                bound = "" if r.bound is None else f"{100 * r.bound:.0f} %"
                note = r.note if r.holds else f"{r.note} outside".strip()
                lines.append(f"| {r.row} | {r.unit} | {r.paper:.4g} | {r.predicted:.4g} | {100 * r.error:+.1f} % | "
                             f"{bound} | {note} |")
        lines.append("")
    return "\n".join(lines)
