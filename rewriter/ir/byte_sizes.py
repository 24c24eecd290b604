"""Sizes as people write them: 120MiB, 1.5 GB, 4096."""

from __future__ import annotations

import re

from forebay.rewriter.ir.plan import TIERS, Budget, PlanError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40,
         "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_nbytes(value: int | str, what: str = "size") -> int:
    """Bytes of an int or a string such as '120MiB' (1024-based: KiB, K), '1.5GB' (1000-based); PlanError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PlanError(f"{what}: expected bytes as int or a string like '120MiB', found {value!r}")
    if isinstance(value, int):
        nbytes = value
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in UNITS:
            raise PlanError(f"{what}: cannot read {value!r}; write bytes or a size like 500MB, 120MiB, 1.5GiB")
        size = float(match[1]) * UNITS[match[2].upper()]
        if size >= 1 << 63:
            raise PlanError(f"{what}: {value[:40]!r} is more than any machine has")
        nbytes = int(size)
    if nbytes <= 0:
        raise PlanError(f"{what}: {value!r} is not a positive size")
    return nbytes


def eighth(nbytes: int) -> int:
    """An eighth of the largest power of two within a size."""
    return 1 << max(0, nbytes.bit_length() - 4)


def format_nbytes(nbytes: int) -> str:
    """Bytes for people: 1.5 GiB, 120.0 MiB, 800 B."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"


def parse_budget(budget: object) -> Budget:
    """A `Budget` from bytes, '500MB', 'device=500MB,host=2GB,disk=/path', or a mapping of those; PlanError names the
    tier that is wrong."""
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, str) and "=" in budget:
        pairs = [part.partition("=") for part in budget.split(",") if part.strip()]
        budget = {key.strip(): value.strip() for key, _, value in pairs}
    if isinstance(budget, int | str):
        budget = {"device": budget}
    if not isinstance(budget, dict):
        raise PlanError(f"budget: expected bytes, a string or a mapping of tiers, found {type(budget).__name__}")
    unknown = set(budget) - set(TIERS)
    if unknown:
        raise PlanError(f"budget: unknown tier {sorted(map(str, unknown))[0]!r}; the tiers are {', '.join(TIERS)}")
    if "device" not in budget:
        raise PlanError("budget: say how much device memory may be used, as device=500MB")
    host = budget.get("host", 0)
    disk = budget.get("disk")
    if disk is not None and not isinstance(disk, str):
        disk = str(disk)
    return Budget(parse_nbytes(budget["device"], "budget.device"),
                  parse_nbytes(host, "budget.host") if host not in (0, None) else 0, disk)
