"""Events of a GPU's streams, which threads record and wait for."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from forebay.runtime.devices.streams import Ticket


@dataclass(slots=True)
class DeviceEvent:
    """An event that any stream may record. `issued` is done when the record itself has been issued (a CUDA event) or
    when the work before it is complete (`cuda` is None). Of its waits `handed` were given to workers, which have
    issued as many as `met` has entries."""

    issued: Ticket = field(default_factory=Ticket)
    cuda: torch.cuda.Event | None = None
    handed: int = 0
    met: list[None] = field(default_factory=list)

    @property
    def spare(self) -> torch.cuda.Event | None:
        """The CUDA event, to be recorded anew, where nobody is yet to wait for this record: a wait that was issued
        stays one for what was recorded then. None where somebody may."""
        return self.cuda if self.issued.ready() and self.handed == len(self.met) else None
