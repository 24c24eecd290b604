"""Memory that a plan may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bytes per tier that a Program may use for everything together; None is no limit."""

    device: int
    host: int | None = 0

    @property
    def limits(self) -> Limits:
        """The bytes alone."""
        return Limits(self.device, self.host)

    def hold(self, other: Limits) -> bool:
        """Return whether what keeps to `other` keeps to these."""
        room = self.host is None or (other.host is not None and self.host >= other.host)
        return room and self.device >= other.device


@dataclass(frozen=True)
class Budget(Limits):
    """The memory and folder that a run may use: `Limits`, and the folder for weights that move out of memory."""

    disk: str | None = None
