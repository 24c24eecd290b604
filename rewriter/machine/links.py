"""Tiers of memory, and the paths between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tier:
    """A place for bytes: how many it offers, and how fast what computes on it reads it (0: nothing computes there)."""

    capacity_nbytes: int
    bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class Link:
    """A path between two tiers: moving n bytes takes latency_s + n / bandwidth_bytes_per_s; r2 says how well that fits.

    `method` is the engine or copy that was measured ("direct", "buffered", "uring", "pinned", "memcpy", …), with
    `depth` requests of `chunk_nbytes` in flight (0 where that has no meaning).
    """

    src: str
    dst: str
    bandwidth_bytes_per_s: float
    latency_s: float
    method: str
    depth: int = 0
    chunk_nbytes: int = 0
    r2: float = 1.0

    def time_s(self, nbytes: int) -> float:
        """Seconds to move `nbytes` in one transfer."""
        return self.latency_s + nbytes / self.bandwidth_bytes_per_s


def onto_device(links: Iterable[Link]) -> tuple[Link, ...]:
    """Return the paths between disk and host memory as those of a device whose memory that is."""
    there = {"host": "device", "disk": "disk"}
    return tuple(replace(link, src=there[link.src], dst=there[link.dst]) for link in links
                 if {link.src, link.dst} == there.keys())
