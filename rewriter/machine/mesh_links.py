"""Measured costs among the ranks of a mesh: exchanges, and slowdowns while all compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from forebay.runtime.devices.kind import DeviceKind
from forebay.runtime.devices.kinds import HOST

# Of an exchange, steps after one another in which K ranks pass something on in a ring.
RING_STEPS: dict[str, Callable[[int], int]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1), "all_gather_into_tensor": lambda ranks: ranks - 1,
    "reduce_scatter_tensor": lambda ranks: ranks - 1, "all_to_all_single": lambda ranks: ranks - 1,
    "broadcast_": lambda ranks: 1}


@dataclass(frozen=True)
class ExchangeLink:
    """An exchange among so many ranks takes latency_s + n / bandwidth_bytes_per_s, n being the bytes that each has
    behind it; r2 says how well that fits. `kind` is torch's name for it."""

    kind: str
    ranks: int
    bandwidth_bytes_per_s: float
    latency_s: float
    r2: float = 1.0

    def time_s(self, nbytes: float) -> float:
        return self.latency_s + nbytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True)
class MeshLinks:
    """Measurements on `ranks` ranks over `backend`; without exchanges nothing was measured.

    Attributes:
        memory_slowed: How many times as long matmuls that memory bounds take while all ranks compute.
        flops_slowed: The same of matmuls that arithmetic bounds.
        reads_slowed: The same of reads while all ranks read the disk.
        overlap_penalty: Share (0..1) of a collective's time by which matmuls at the same time take longer.
    """

    ranks: int = 1
    backend: str = ""
    date: str = ""
    exchanges: tuple[ExchangeLink, ...] = ()
    memory_slowed: float = 1.0
    flops_slowed: float = 1.0
    reads_slowed: float = 1.0
    overlap_penalty: float = 1.0

    def validate(self) -> None:
        """Raise ValueError naming the first field that cannot be true."""
        for i, link in enumerate(self.exchanges):
            at = f"mesh.exchanges[{i}]"
            if link.kind not in RING_STEPS:
                raise ValueError(f"machine profile: {at}.kind must be one of {', '.join(RING_STEPS)}, is {link.kind!r}")
            for name, value, least in (("ranks", link.ranks, 2), ("latency_s", link.latency_s, 0.0)):
                if not (math.isfinite(value) and value >= least):
                    raise ValueError(f"machine profile: {at}.{name} must be at least {least}, is {value!r}")
            if not (math.isfinite(link.bandwidth_bytes_per_s) and link.bandwidth_bytes_per_s > 0):
                raise ValueError(f"machine profile: {at}.bandwidth_bytes_per_s must be finite and above 0, is "
                                 f"{link.bandwidth_bytes_per_s!r}")
        for name in ("memory_slowed", "flops_slowed", "reads_slowed"):
            if not (math.isfinite(value := getattr(self, name)) and value >= 1):
                raise ValueError(f"machine profile: mesh.{name} must be at least 1, is {value!r}")

        if not 0 <= self.overlap_penalty <= 1:
            raise ValueError("machine profile: mesh.overlap_penalty must lie between 0 and 1, is "
                             f"{self.overlap_penalty!r}")

    def exchange_s(self, kind: str, ranks: int, nbytes: float, device: DeviceKind = HOST) -> float:
        """Seconds of an exchange that leaves `nbytes` on each of so many ranks, from when the last of them is there. Of
        as many as were not measured: as of the nearest number that was, and as many times as long as a ring has steps;
        where none was, the cautious guess of its kind of device."""
        steps = RING_STEPS[kind](ranks)
        known = [link for link in self.exchanges if link.kind == kind]
        if not known:
            return steps * device.exchange_step_s + nbytes / device.exchange_bytes_per_s
        nearest = min(known, key=lambda link: (abs(link.ranks - ranks), link.ranks))
        return nearest.time_s(nbytes) * steps / RING_STEPS[kind](nearest.ranks)

    def reads_slowed_among(self, ranks: int) -> float:
        """Return how many times as long reads take while so many ranks read: as measured, and in proportion of other
        numbers, which share what the disk gives."""
        return 1 + (self.reads_slowed - 1) * (ranks - 1) / max(1, self.ranks - 1)

    def slowed(self, share: float) -> float:
        """Slowdown of a launch that takes `share` (0..1) of the memory's rate, while other ranks compute."""
        return self.flops_slowed + min(1.0, share) * (self.memory_slowed - self.flops_slowed)
