"""Where the caches of a batch lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CachePlacement:
    """Of the caches, one for each layer and micro-batch, `on_device` lie on the device and `on_host` in host memory,
    spread evenly over the turns, and all others on the `tier`. What does not lie on the device is loaded for its turn
    into one of `slots` staging slots, in blocks of `block_tokens` tokens; the block that is not full yet stays on the
    device.

    With `cpu_attention` decode steps, and those that check drafts, attend over caches in host memory there: only
    queries, new keys and values, and results cross the link, while the device computes for other micro-batches. Those
    caches have no tails.
    """

    tier: Literal["device", "host", "disk"] = "device"
    block_tokens: int = 0
    slots: int = 0
    on_device: int = 0
    on_host: int = 0
    cpu_attention: bool = False

    @property
    def staged(self) -> bool:
        """Whether caches come to the device for their turns."""
        return self.tier != "device"

    def fault(self, checkpoints: int) -> str:
        """What contradicts itself, beside so many checkpoints, as the field and why; "" for nothing."""
        if self.staged and (self.slots < 1 or self.block_tokens < 1):
            return f"cache: a cache on the tier {self.tier} needs slots and block_tokens of at least 1"
        own = ("slots", "block_tokens", "on_device", "on_host", "cpu_attention")
        given_ones = {f"cache.{name}": getattr(self, name) for name in own} | {"recomputation.checkpoints": checkpoints}
        for name, given in given_ones.items():
            if given < 0 or (given and not self.staged) or (given and name == "cache.on_host" and self.tier == "host"):
                return f"{name}: {given} is for a cache on a tier further off than {self.tier}, and never below 0"
        return ""

    def has_tails(self, tier: str) -> bool:
        """Whether the blocks that are not full yet of caches of this tier stay on the device."""
        return tier == "disk" or (tier == "host" and not self.cpu_attention)
