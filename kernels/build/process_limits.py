"""The cores and the memory that this process may use: the machine's, within what its control groups allow.

A container is a control group (cgroup) of version 1 or 2. Each group that holds the process limits it, so the smallest
limit counts. Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst, and
Documentation/scheduler/sched-bwc.rst for version 1's share of the cores.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

PROC = Path("/proc")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNLIMITED = 1 << 60  # version 1 writes the largest whole number of pages where no limit is set
# Files of a group by version: limits of its memory, the bytes in use, and the entries of memory.stat that count pages
# of files, which the kernel takes back before the group is full.
MEMORY = {1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
          2: (("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file"))}


class _Group(NamedTuple):
    """A control group: the version of its controller, and the folder of its files."""

    version: int
    folder: Path


def core_count() -> int:
    """Cores that this process may keep busy: those that it may run on, or fewer where a group has a share of their
    time; a part of a core counts as one."""
    shares = [share for group in _groups("cpu") if (share := _core_share(group)) is not None]
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, shares)]))


def limited_cores() -> int | None:
    """`core_count` where groups allow fewer cores than this process may run on, which OpenMP and torch do not know;
    else None."""
    cores = core_count()
    return cores if cores < len(os.sched_getaffinity(0)) else None


def available_nbytes() -> int:
    """Bytes of memory that this process could still take without swapping."""
    free = [limit - _used_nbytes(group) for group in _groups("memory") if (limit := _memory_limit(group)) is not None]
    return max(0, min([_machine_nbytes(), *free]))


def memory_limit_nbytes() -> int | None:
    """The smallest memory limit of the groups that hold this process; None where none has one."""
    limits = (_memory_limit(group) for group in _groups("memory"))
    return min((limit for limit in limits if limit is not None), default=None)


def last_level_nbytes() -> int:
    """Bytes of the processor's largest cache; 0 where the kernel does not tell."""
    sizes = (word.removesuffix("K") for path in CACHES.glob("index*/size") for word in _words(path)[:1])
    return max((int(size) << 10 for size in sizes if size.isdecimal()), default=0)


def _core_share(group: _Group) -> float | None:
    """Return how many cores' time a group may use; None where that is not limited."""
    if group.version == 2:
        quota, period = [*_words(group.folder / "cpu.max"), "", ""][:2]
    else:
        quota, period = (next(iter(_words(group.folder / f"cpu.cfs_{name}_us")), "") for name in ("quota", "period"))
    limited = quota.isdecimal() and period.isdecimal() and min(int(quota), int(period)) > 0
    return int(quota) / int(period) if limited else None  # -1 or `max`: no limit


def _memory_limit(group: _Group) -> int | None:
    """Bytes that a group may use; None where they are not limited."""
    words = [word for name in MEMORY[group.version][0] for word in _words(group.folder / name)[:1]]
    limits = [int(word) for word in words if word.isdecimal() and int(word) < UNLIMITED]
    return min(limits, default=None)


def _used_nbytes(group: _Group) -> int:
    """Bytes that a group uses and that the kernel would not take back; 0 where it does not say."""
    _, usage, reclaimed = MEMORY[group.version]
    used = next((int(word) for word in _words(group.folder / usage)[:1] if word.isdecimal()), 0)
    words = _words(group.folder / "memory.stat")
    stat = {name: int(value) for name, value in zip(words[::2], words[1::2], strict=False) if value.isdecimal()}
    return max(0, used - sum(stat.get(name, 0) for name in reclaimed))


def _groups(controller: str) -> Iterator[_Group]:
    """The groups that hold this process and have the controller's files, innermost first."""
    for line in _lines(PROC / "self/cgroup"):
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if not path.startswith("/") or (names and controller not in names.split(",")):
            continue
        version = 1 if names else 2
        for root, mount in _mounts(version, controller):
            # A container may see its own group at the mount point, and yet be told the group's path on the host.
            held = PurePosixPath(path)
            inner = held.relative_to(root) if held.is_relative_to(root) else PurePosixPath()
            folder = mount / inner if ".." not in inner.parts else mount
            for each in (folder, *folder.parents):
                yield _Group(version, each)
                if each == mount:
                    break


def _mounts(version: int, controller: str) -> Iterator[tuple[str, Path]]:
    """The group at the root of each mount of that version, and its mount point."""
    for line in _lines(PROC / "self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] != {1: "cgroup", 2: "cgroup2"}[version]:
            continue
        if version == 2 or controller in kind[2].split(","):
            yield _unescaped(fields[3]), Path(_unescaped(fields[4]))


def _unescaped(text: str) -> str:
    """A field of mountinfo, in which white space is written as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _machine_nbytes() -> int:
    """Bytes that the machine could give to a new process; where it does not say, those of pages that are free."""
    for line in _lines(PROC / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]


def _lines(path: Path) -> list[str]:
    """Lines of a file of the kernel; none where it is not there or may not be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8").splitlines()
    return []
