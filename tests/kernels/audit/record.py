"""What the compiler made of each kernel configuration, kept beside the code: only what changed since is compiled again.

A row is known by everything that its facts follow from: the kernel's source with all that it calls, its signature,
constants and options, the target, the compiler's version, and the files here that read machine code. Bounds are not
kept: they are held anew against the facts at every run.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.kernels.audit.chips import Hot

if TYPE_CHECKING:
    from tests.kernels.audit.audit_case import AuditCase
    from tests.kernels.audit.audit_kernels import Audited

FOLDER = Path(__file__).parent
READERS = ("chips.py", "sass.py")  # what facts are read from machine code with


def record_path() -> Path:
    """The record of the Triton that is installed."""
    import triton

    return FOLDER / f"triton-{triton.__version__}.json"


@functools.cache
def _readers() -> str:
    return "".join((FOLDER / name).read_text() for name in READERS)


def key_of(case: AuditCase, arch: str) -> str:
    """What the facts of a case on a target follow from, hashed."""
    import triton

    parts = (triton.__version__, arch, case.fn.cache_key, sorted(case.signature.items()),
             sorted((name, getattr(value, "cache_key", str(value))) for name, value in case.constants.items()),
             sorted(case.divisible),
             case.num_warps, case.num_stages, case.amd_stages, case.max_registers, case.turn_nbytes,
             _readers())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def load(path: Path | None = None) -> dict[str, dict[str, Any]]:
    """ModelNeeds by key; empty where no record of this compiler is kept."""
    path = path or record_path()
    return json.loads(path.read_text()) if path.is_file() else {}


def save(results: Mapping[str, Audited], path: Path | None = None) -> None:
    """Keep `results`, by key, in place of the record; a row a line, so that a change shows what it changed."""
    compiled = [(key, found) for key, found in results.items() if found.registers]  # what does not has no facts
    rows = (f"{json.dumps(key)}: {json.dumps(_facts(found))}" for key, found in _by_name(compiled))
    (path or record_path()).write_text("{\n" + ",\n".join(rows) + "\n}\n")


def _by_name(items: Iterable[tuple[str, Audited]]) -> list[tuple[str, Audited]]:
    return sorted(items, key=lambda item: (item[1].name, item[1].arch))


def _facts(found: Audited) -> dict[str, Any]:
    facts = asdict(found)
    del facts["problems"], facts["bytes_moved"], facts["minimum_share"]  # the case's own, and what bounds say of it
    return facts


def hot_of(facts: Mapping[str, Any]) -> Hot | None:
    """The hot loop of a kept row; KeyError where the record is of another release of `chips`."""
    found = facts["hot"]
    if found is None:
        return None
    return Hot(**{f.name: tuple(found[f.name]) if f.name == "unknown_opcodes" else found[f.name] for f in fields(Hot)})
