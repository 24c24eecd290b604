"""Python's garbage collector, out of the way while many small objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

DUE = 200_000  # objects, some 30 MB
_unseen = [0]  # objects that went to the oldest generation since it was last looked through
_frozen = [False]  # somebody keeps objects frozen; they are counted one by one, 10 ms for those of a long-lived process


@contextmanager
def no_collection() -> Iterator[None]:
    """Graphs are many small objects that stay; the collector's passes over them were 15 % of the time at 96 layers.

    What was made meanwhile goes to the oldest generation unlooked at: left among the youngest, the next allocation
    anywhere would have all of it traversed (25 ms at 96 layers, after every use of this).
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            _unseen[0] += gc.get_count()[0]
            _frozen[0] = _frozen[0] or gc.get_freeze_count() > 0
            if not _frozen[0]:  # unfreezing would give back what somebody keeps
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def collect_when_due() -> None:
    """Look through all objects if many were made under `no_collection` since: Python counts none of them, so models
    opened and closed by the thousand would never be freed. It takes tenths of a second, so call it where work ends."""
    if _unseen[0] > DUE:
        gc.collect()
        _unseen[0], _frozen[0] = 0, False  # looked at again, which is little beside that
