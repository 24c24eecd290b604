"""Parsed JSON as the dataclass that it describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints


def from_json(kind: Any, data: object, path: str) -> Any:
    """Convert parsed JSON to the annotated type `kind`, refusing unknown, missing and mistyped fields by path with
    a ValueError."""
    if is_dataclass(kind):
        if not isinstance(data, dict):
            raise ValueError(f"{path}: expected an object, found {type(data).__name__}")
        hints = _hints(kind)  # type: ignore[arg-type]  # a class, as all kinds are
        unknown = set(data) - set(hints)
        if unknown:
            raise ValueError(f"{path}.{sorted(unknown)[0]}: unknown field")
        values = {}
        for f in fields(kind):
            if f.name in data:
                values[f.name] = from_json(hints[f.name], data[f.name], f"{path}.{f.name}")
            elif f.init and f.default is f.default_factory is MISSING:
                raise ValueError(f"{path}.{f.name} is missing")
        try:
            return kind(**values)  # type: ignore[operator]
        except TypeError as error:
            raise ValueError(f"{path}: {error}") from error
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        if data not in args:
            raise ValueError(f"{path}: {data!r} is not one of {', '.join(map(str, args))}")
        return data
    if origin is tuple:
        if not isinstance(data, list):
            raise ValueError(f"{path}: expected a list, found {type(data).__name__}")
        return tuple(from_json(args[0], item, f"{path}[{i}]") for i, item in enumerate(data))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(data, dict):
            raise ValueError(f"{path}: expected an object, found {type(data).__name__}")
        return {key: from_json(args[1], item, f"{path}.{key}") for key, item in data.items()}
    if origin is UnionType:
        if data is None and type(None) in args:
            return None
        return from_json(next(a for a in args if a is not type(None)), data, path)
    if isinstance(data, int) and not -(1 << 63) <= data < 1 << 63:
        raise ValueError(f"{path}: a number of {data.bit_length()} bits; 64 are the most")
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise ValueError(f"{path}: expected {kind.__name__}, found {data!r}")
    return data


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Types of a dataclass's fields; reading them from their words takes longer than all else here."""
    return get_type_hints(kind)
