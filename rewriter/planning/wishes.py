"""What a user forces of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forebay.rewriter.ir.plan import Block


@dataclass(frozen=True)
class Wishes:
    """Choices the user forces; None leaves them to the planner."""

    slots: int | None = None
    slot_nbytes: int | None = None
    lead: int | None = None
    prefill_chunk: int | None = None
    cache_format: str = "native"
    micro_batches: int | None = None
    order: Literal["row", "zigzag"] = "zigzag"
    cache_tier: Literal["device", "disk"] | None = None
    cache_tokens: int | None = None
    cache_slots: int = 3
    entering: int | None = None  # sequences of a prefill step; None: all at once

    def block(self, batch: int) -> Block:
        """The block for `batch` sequences with their cache on the device; no micro-batch is empty."""
        return Block(min(self.micro_batches or 1, batch), self.order, entering=min(self.entering or 0, batch))
