"""Watchers of other ranks, for those that wait; without torch.distributed, which a single process never loads."""

from __future__ import annotations

from typing import Protocol


class Lookout(Protocol):
    """Watcher of the other ranks."""

    def fault(self) -> BaseException | None: ...


_lookout: Lookout | None = None


def look_out(lookout: Lookout | None) -> None:
    """Let waits for other ranks ask `lookout`."""
    global _lookout
    _lookout = lookout


def rank_fault() -> BaseException | None:
    """Return the failure of another rank; None while all are heard of, and where there are none."""
    return None if _lookout is None else _lookout.fault()
