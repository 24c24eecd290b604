"""The tiers of hidden states between the turns of micro-batches."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Literal

from forebay.rewriter.ir.schedule.admission import Admission
from forebay.rewriter.ir.schedule.micro_batches import MicroBatches
from forebay.rewriter.ir.schedule.spread import spread_tiers


@dataclass(frozen=True)
class HiddenPlacement:
    """Between the turns of a prefill step hidden states of `on_device` micro-batches stay on the device and those of
    `on_host` wait in host memory, spread evenly, and all others on the `tier`: these come back for their turns into one
    of `slots` regions (FlexGen, section 4.2). Those of other steps are of few tokens, and stay."""

    tier: Literal["device", "host", "disk"] = "device"
    slots: int = 0
    on_device: int = 0
    on_host: int = 0

    def homes(self, micro_batches: int) -> list[str]:
        """The tier that each micro-batch's hidden states are on between its turns."""
        return list(spread_tiers(micro_batches, self.tier, self.on_device, self.on_host))

    def regions(self, micro_batches: int) -> list[int]:
        """The number of the region of device memory that each micro-batch's hidden states have during its turns: those
        that stay on the device have one for themselves, the first of all, the others take the rest in turn."""
        staying, away = itertools.count(), itertools.count()
        homes, slots = self.homes(micro_batches), max(1, self.slots)
        kept = homes.count("device")
        return [next(staying) if home == "device" else kept + next(away) % slots for home in homes]

    def fault(self, micro_batches: MicroBatches, admission: Admission) -> str:
        """Return the first contradiction, as the field and the reason; "" for none."""
        counts = {name: value for name, value in asdict(self).items() if name != "tier"}
        if self.tier == "device":
            return next((f"hidden.{name}: {given} is for hidden states that leave the device (hidden.tier)"
                         for name, given in counts.items() if given), "")
        if not micro_batches.takes_turns or admission.sequences:
            return (f"hidden.tier: {self.tier} is for micro-batches that take turns in zigzag order "
                    "(plan.schedule.batching.micro_batches.count and order), without "
                    "plan.schedule.batching.admission.sequences")
        if self.slots < 1 or min(counts.values()) < 0 or (self.tier == "host" and self.on_host):
            return (f"hidden.slots, hidden.on_device, hidden.on_host: {', '.join(map(str, counts.values()))} must be "
                    "at least 1, 0 and 0, and hidden.on_host is for a tier further off")
        if self.on_device + self.on_host > micro_batches.count:
            return (f"hidden.on_device, hidden.on_host: {self.on_device} and {self.on_host} exceed the "
                    f"{micro_batches.count} of plan.schedule.batching.micro_batches.count")
        return ""
