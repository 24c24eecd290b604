"""Calls of tools in a model's text, in the forms of Hermes and Qwen, Llama 3, and Mistral."""

from __future__ import annotations

import json
import re
from typing import Any

Calls = list[tuple[str, str]]  # names of functions, and their arguments as JSON
XML_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|$)", re.DOTALL)
XML_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
MISTRAL_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")


def parse_bare(text: str) -> Calls | None:
    """Calls as an object of JSON with name and arguments, or as several, in a list or one after the other; None where
    there are none."""
    values = _json_values(text)
    calls = [_call(value) for value in values or () for value in (value if isinstance(value, list) else [value])]
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def parse_hermes(text: str) -> Calls | None:
    """Calls as JSON, else as Qwen3-Coder writes them, as elements with names."""
    if (calls := parse_bare(text)) is not None:
        return calls
    found = [(name, json.dumps({key: _value(said) for key, said in XML_PARAMETER.findall(body)}, ensure_ascii=False))
             for name, body in XML_FUNCTION.findall(text)]
    return found or None


def parse_mistral(text: str) -> Calls | None:
    """Calls as a list of JSON, or as a name before its arguments."""
    if (calls := parse_bare(text)) is not None:
        return calls
    named = MISTRAL_NAME.match(text)
    arguments = _json_values(text[named.end() :]) if named else None
    if named is None or not arguments or len(arguments) != 1:
        return None
    return [(named[1], json.dumps(arguments[0], ensure_ascii=False))]


def _json_values(text: str) -> list[Any] | None:
    """Values of JSON one after the other, with semicolons or commas between them; None if there is anything else."""
    values: list[Any] = []
    at, decoder = 0, json.JSONDecoder()
    try:
        while at < len(text):
            if text[at].isspace() or (values and text[at] in ";,"):
                at += 1
                continue
            value, at = decoder.raw_decode(text, at)
            values.append(value)
    except (ValueError, RecursionError):
        return None
    return values


def _call(value: Any) -> tuple[str, str] | None:
    if not isinstance(value, dict):
        return None
    value = value.get("function") if isinstance(value.get("function"), dict) else value
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict | str):
        return None
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _value(text: str) -> Any:
    """A parameter's value: JSON where it is any, else text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
