"""The settings that torchrun passes to a process."""

from __future__ import annotations

import os


def ranks_launched() -> int:
    """Processes that were started together; 1 for one alone."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def has_launcher() -> bool:
    """Return whether the variables are there by which ranks find each other."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_rank(rank: int) -> int:
    """This process among those of its machine; `rank` where nobody says."""
    return int(os.environ.get("LOCAL_RANK", rank))


def ranks_here(ranks: int) -> int:
    """Return how many of these ranks run on this machine; all where torchrun does not say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def store_place() -> str:
    """Return the address of the store by which ranks find each other, as far as torchrun gives it."""
    host = os.environ.get("MASTER_ADDR")
    return f" at {host}" if host else ""
