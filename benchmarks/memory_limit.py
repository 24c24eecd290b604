"""A limit of memory that the kernel holds a process to, its share of the page cache counted: a control group."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def enter_limit(nbytes: int) -> bool:
    """From now on, what this process takes beside what it has, pages of files included, is at most `nbytes`: pages are
    dropped, and where that is not enough the process is killed. False where groups cannot be made here."""
    first = (ROOT / "cgroup.controllers").exists()
    folder = (ROOT if first else ROOT / "memory") / f"forebay-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.max" if first else "memory.limit_in_bytes")).write_text(str(nbytes))
        (folder / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        return False
    return True


def remove_limits() -> None:
    """Take away the groups of processes that have ended."""
    for folder in (*ROOT.glob("forebay-*"), *(ROOT / "memory").glob("forebay-*")):
        if not (folder / "cgroup.procs").read_text():
            folder.rmdir()
