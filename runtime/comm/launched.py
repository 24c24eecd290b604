"""What torchrun says to a process that it starts."""

from __future__ import annotations

import os


def ranks_launched() -> int:
    """Processes that were started together; 1 for one alone."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def has_launcher() -> bool:
    """Whether the variables are there by which ranks find each other."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_rank(rank: int) -> int:
    """This process among those of its machine; `rank` where nobody says."""
    return int(os.environ.get("LOCAL_RANK", rank))


def store_place() -> str:
    """Where the store is by which ranks find each other, as far as that is said."""
    host = os.environ.get("MASTER_ADDR")
    return f" at {host}" if host else ""
