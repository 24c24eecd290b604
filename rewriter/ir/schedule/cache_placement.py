"""The tiers of a batch's caches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class CachePlacement:
    """The tiers of caches. Of one cache for each layer and micro-batch, `on_device` lie on the device and `on_host` in
    host memory, spread evenly over the turns, and all others on the `tier`. What does not lie on the device is loaded
    for its turn into one of `slots` staging slots, in blocks of `block_tokens` tokens; the block that is not full yet
    stays on the device.

    With `cpu_attention` decode steps, and those that check drafts, attend over caches in host memory there: only
    queries, new keys and values, and results cross the link, while the device computes for other micro-batches. Those
    caches have no tails. With `in_place` kernels of the device attend over them there in all steps, and append to
    them: they are not copied, have no tails either, and need no slots.
    """

    tier: Literal["device", "host", "disk"] = "device"
    block_tokens: int = 0
    slots: int = 0
    on_device: int = 0
    on_host: int = 0
    cpu_attention: bool = False
    in_place: bool = False

    @property
    def staged(self) -> bool:
        """Whether caches come to the device for their turns."""
        return self.tier != "device"

    @property
    def stays_on_host(self) -> bool:
        """Whether decode steps attend over caches in host memory there."""
        return self.cpu_attention or self.in_place

    def fault(self) -> str:
        """Return the first contradiction, as the field and the reason; "" for none."""
        if self.in_place and (self.cpu_attention or not (self.on_host or self.tier == "host")):
            return ("cache.in_place: the device reads caches in host memory in place, where there are some that "
                    "cache.cpu_attention does not let the CPU attend over")
        least = 0 if self.in_place and self.tier == "host" else 1
        if self.staged and (self.slots < least or self.block_tokens < 1):
            return f"cache: a cache on the tier {self.tier} needs slots and block_tokens of at least 1"
        given = {name: getattr(self, name) for name in ("slots", "block_tokens", "on_device", "on_host",
                                                        "cpu_attention")}
        return next((self.further_off(f"cache.{name}", value) for name, value in given.items() if value < 0 or (
            value and (not self.staged or (name == "on_host" and self.tier == "host")))), "")

    def further_off(self, name: str, value: int) -> str:
        """Return why a field has no such value: caches lie too near."""
        return f"{name}: {value} is for a cache on a tier further off than {self.tier}, and never below 0"

    def read_in_place(self) -> CachePlacement:
        """Return the placement with caches in host memory read there, and no slots where all others are on the
        device."""
        return replace(self, in_place=True, slots=0 if self.tier == "host" else self.slots)

    def has_tails(self, tier: str) -> bool:
        """Return whether the blocks that are not full yet of caches of this tier stay on the device."""
        return tier == "disk" or (tier == "host" and not self.stays_on_host)
