"""Fields of a request's body: read, checked, and refused with what to do."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any

from forebay.serving.refusal import Refusal

MOST_WARNING_CHARACTERS = 1000


class RequestFields:
    """The fields of a body, an object of JSON; null is as good as none. What is passed over is among the `warnings`,
    or with `strict` refused."""

    def __init__(self, body: bytes | dict[str, Any], strict: bool = False) -> None:
        given = body if isinstance(body, dict) else read_object(body)
        self.given = {name: value for name, value in given.items() if value is not None}
        self.strict = strict
        self.warnings: list[str] = []

    def get(self, name: str) -> Any:
        return self.given.get(name)

    def pass_over(self, name: str, why: str) -> None:
        """Go on without a field; Refusal (400) where that is not wanted."""
        if self.strict:
            raise Refusal(400, f"{name} {why}; leave it out, or start the server without --strict", name)
        self.warnings.append(f"{name} {why}")

    def pass_over_unknown(self, known: Collection[str]) -> None:
        """Go on without fields of other names."""
        for name in self.given:
            if name not in known:
                self.pass_over(name, "is not known here")

    def number(self, name: str, least: float, most: float, typical: float) -> float:
        value = self.get(name)
        if value is None:
            return typical
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise Refusal(400, f"{name} must be a number from {least:g} to {most:g}", name)
        return 0.0 if math.isclose(value, 0.0, abs_tol=1e-6) else float(value)

    def integer(self, name: str, least: int, most: int) -> int | None:
        value = self.get(name)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise Refusal(400, f"{name} must be an integer from {least} to {most}", name)
        return value

    def flag(self, name: str, typical: bool = False) -> bool:
        value = self.get(name)
        if value is not None and type(value) is not bool:
            raise Refusal(400, f"{name} must be true or false", name)
        return typical if value is None else value

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise Refusal(400, f"{name} must be an object", name)
        return value or {}


def header_text(warnings: Collection[str]) -> str:
    """Warnings as the value of an HTTP header."""
    return "; ".join(warnings).encode("ascii", "replace").decode()[:MOST_WARNING_CHARACTERS].translate(
        {code: " " for code in (*range(32), 127)})


def read_object(body: bytes) -> dict[str, Any]:
    """The object of JSON in a body; Refusal (400) where there is none."""
    def refuse(word: str) -> float:
        raise ValueError(f"{word} is no number of JSON")

    try:
        given = json.loads(body.decode("utf-8"), parse_constant=refuse)
        json.dumps(given, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise Refusal(400, "the body holds half of a surrogate pair, which is no text") from error
    except UnicodeDecodeError as error:
        raise Refusal(400, f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise Refusal(400, f"the body must be an object of JSON, not {type(given).__name__}")
    return given
