"""What became of one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Outcome:
    """`result` is "equal", "refused" (by name, in one line: `reason`) or "failed", which no row should be."""

    result: Literal["equal", "refused", "failed"]
    reason: str = ""


EQUAL = Outcome("equal")


def failed(reason: str) -> Outcome:
    return Outcome("failed", reason)


def one_line(error: object) -> str:
    return " ".join(str(error).split())[:240]
