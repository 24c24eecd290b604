"""Continuous batching: sequences that a prefill step computes alone, for slots of the batch that fell free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Admission:
    """A prefill step computes so many `sequences` alone, for the slots that its input names; the others keep their
    cache. With 0 it computes all of them. Sequences that are admitted stand in any micro-batches, so then all caches of
    a layer lie on one tier, and shares of caches are of whole layers."""

    sequences: int = 0

    def fault(self, batch: int) -> str:
        """Return the first contradiction, as the field and the reason; "" for none."""
        return "" if 0 <= self.sequences <= batch else (
            f"admission.sequences: {self.sequences} is not between 0 and the batch of {batch} (plan.workload.batch)")

    def begins(self, waiting: int, free: int, slots: int) -> int:
        """Return how many of `waiting` requests a prefill begins now, with so many `slots`, some of them `free`: as
        many as it computes alone once their slots are free; or all together, as many as there are slots, when all are
        free."""
        count = min(self.sequences or slots, waiting)
        return count if free >= (count if self.sequences else slots) else 0

    def prefills(self, batch: int) -> int:
        """Return how many times prefill steps run until they have computed `batch` sequences."""
        return -(-batch // self.sequences) if self.sequences else 1
