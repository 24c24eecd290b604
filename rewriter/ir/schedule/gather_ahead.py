"""Memory for weights that ranks gather before they are read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GatherAhead:
    """Buffers for weights that prefill steps gather among ranks: memory for `buffers` times the weights read at once,
    so that they are gathered while others are read; 0: each is gathered right before it is read."""

    buffers: int = 0

    def fault(self) -> str:
        """Return the first contradiction, as the field and the reason; "" for none."""
        return f"gathering.buffers: {self.buffers} must not be below 0" if self.buffers < 0 else ""
