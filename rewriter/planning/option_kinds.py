"""Kinds of option values: how each is checked, and how the command line writes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forebay.kernels.formats.table import cache_format, checkpoint_format
from forebay.rewriter.ir.byte_sizes import parse_nbytes
from forebay.rewriter.ir.plan import Plan, PlanError, load_plan


@dataclass(frozen=True)
class OptionKind:
    """The values that an option takes. None leaves the option out.

    words: what they are, for pages: "a whole number of at least 1".
    metavar: how help names one.
    wrong: what is wrong with a value, to follow the option's name: " must be at least 1, found 0"; "" for none.
    parse: the value that a word of the command line means; a word that means none stays, and `wrong` says so.
    take: the value that Python users mean, by the option's name and what they give.
    flag: whether it is on or off.
    """

    words: str
    metavar: str
    wrong: Callable[[Any], str]
    parse: Callable[[str], Any] = str
    take: Callable[[str, Any], Any] = lambda name, value: value
    flag: bool = False


def one_of(*known: str) -> OptionKind:
    """One of a few words."""
    listed = ", ".join(map(repr, known))
    return OptionKind(f"one of {listed}", "|".join(known),
                lambda value: "" if value in known else f" must be one of {listed}, found {value!r}")


def pair(what: str, least: int = 0) -> OptionKind:
    """Two whole numbers."""
    words = "two whole numbers" + (f" of at least {least}" if least else "")
    return OptionKind(f"{words}: {what}", "N,N", lambda value: "" if _is_pair(value, int) and min(value) >= least else (
        f" must be {words}, {what}, found {value!r}"), lambda text: _numbers(text, int), _as_tuple)


def _wrong_size(value: Any, least: int = 1) -> str:
    if not isinstance(value, int) or isinstance(value, bool):
        return f" must be a whole number, found {value!r}"
    return "" if value >= least else f" must be at least {least}, found {value}"


def _wrong_share(value: Any) -> str:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
    return "" if fits else f" must be a number above 0 and at most 1, found {value!r}"


def _wrong_shares(value: Any) -> str:
    fits = _is_pair(value, (int, float)) and all(0 <= share <= 1 for share in value)
    return "" if fits else f" must be two numbers from 0 to 1, found {value!r}"


def _wrong_policy(value: Any) -> str:
    fits = isinstance(value, tuple | list) and len(value) == 6 and all(
        isinstance(part, int | float) and not isinstance(part, bool) and 0 <= part <= 100 for part in value)
    if not fits:
        return f" must be six percentages, found {value!r}"
    over = [what for i, what in enumerate(("weights", "cache", "hidden states")) if sum(value[2 * i :][:2]) > 100]
    return f" has more than 100 % of the {over[0]}, found {value!r}" if over else ""


def _known_to(formats: Callable[[str], object]) -> Callable[[Any], str]:
    """Return the error for a name that a table of formats lacks."""
    def wrong(value: Any) -> str:
        try:
            if value != "native":
                formats(value)
        except ValueError as error:
            return f": {error}"
        return ""

    return wrong


def _wrong_machine(value: Any) -> str:
    from forebay.rewriter.machine.profile import Machine

    return "" if isinstance(value, Machine) else f" must be a profile, or the path or preset of one, found {value!r}"


def _machine(name: str, value: Any) -> Any:
    if not isinstance(value, str | os.PathLike):
        return value
    from forebay.rewriter.machine.presets import load_machine_or_preset

    try:
        return load_machine_or_preset(os.fspath(value))
    except ValueError as error:
        raise PlanError(str(error)) from error


def _as_tuple(name: str, value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _wrong_adapters(value: Any) -> str:
    fits = _is_path(value) or (isinstance(value, Mapping) and value and all(
        isinstance(name, str) and name and _is_path(folder) for name, folder in value.items()))
    return "" if fits else f" must be a folder, or folders by name, found {value!r}"


def _adapters(text: str) -> Any:
    """A folder, or folders by name."""
    pairs = [part.partition("=") for part in text.split(",")]
    if Path(text).expanduser().exists() or not all(equals for _, equals, _ in pairs):
        return text
    return {name: folder for name, _, folder in pairs}


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def _is_pair(value: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(
        isinstance(part, kind) and not isinstance(part, bool) for part in value)


def _nbytes_or_none(name: str, value: Any) -> Any:
    return 0 if value == "0" else parse_nbytes(value, name) if isinstance(value, str) else value


def _number(text: str) -> Any:
    return int(text) if text.strip().removeprefix("-").isdecimal() else text


def _share(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _numbers(text: str, kind: Callable[[str], Any]) -> Any:
    try:
        return tuple(map(kind, text.split(",")))
    except ValueError:
        return text


SIZE = OptionKind("a whole number of at least 1", "N", _wrong_size, _number)
COUNT = OptionKind("a whole number of at least 0", "N", lambda value: _wrong_size(value, 0), _number)
NBYTES = OptionKind("bytes, or a size such as 8MiB", "SIZE", _wrong_size,
              take=lambda name, value: parse_nbytes(value, name) if isinstance(value, str) else value)
NBYTES_OR_NONE = OptionKind("bytes, or a size such as 256MiB; 0: none", "SIZE", lambda value: _wrong_size(value, 0),
                            take=_nbytes_or_none)
SHARE = OptionKind("a number above 0 and at most 1", "SHARE", _wrong_share, _share)
SHARES = OptionKind("two numbers from 0 to 1", "SHARE,SHARE", _wrong_shares, lambda text: _numbers(text, float),
                    _as_tuple)
POLICY = OptionKind("six percentages", "N,N,N,N,N,N", _wrong_policy, lambda text: _numbers(text, float), _as_tuple)
FLAG = OptionKind("True or False", "", lambda value: "" if isinstance(value, bool) else (
    f" must be one of True, False, found {value!r}"), flag=True)
SIZE_OR_AUTO = OptionKind("a whole number of at least 1, or 'auto'", "N|auto|none",
                    lambda value: "" if value == "auto" else _wrong_size(value),
                    lambda text: None if text == "none" else _number(text))
CACHE_FORMAT = OptionKind("'native' or the name of a cache format", "FORMAT", _known_to(cache_format))
CHECKPOINT_FORMAT = OptionKind("'native' or the name of a checkpoint format", "FORMAT", _known_to(checkpoint_format))
PATH = OptionKind("a path", "FILE", lambda value: "" if _is_path(value) else f" must be a path, found {value!r}", Path)
FOLDER = replace(PATH, words="a folder", metavar="DIR")
ADAPTERS = OptionKind("a folder, or folders by name", "DIR|NAME=DIR,…", _wrong_adapters, _adapters)
MODEL = OptionKind("a path or a format", "MODEL|FORMAT|auto", lambda value: "" if _is_path(value) else (
    f" must be a path or a format, found {value!r}"))
MACHINE = OptionKind("a profile, or the path or preset of one", "FILE|NAME", _wrong_machine, take=_machine)
PLAN = OptionKind("a plan, or the path of one", "FILE",
            lambda value: "" if isinstance(value, Plan) else f" must be a plan or a path, found {value!r}",
            take=lambda name, value: load_plan(value) if _is_path(value) else value)
RANKS = OptionKind("ranks of a mesh", "RANKS", lambda value: "")
