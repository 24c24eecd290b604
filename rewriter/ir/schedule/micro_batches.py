"""Micro-batches: the equal parts of a batch, which share passes over the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MicroBatches:
    """`count` parts of equal size, computed one after the other (FlexGen, section 4.1). In `row` order each runs
    through all layers before the next one, and brings the weights anew; in `zigzag` order all run through a layer
    before the next layer, and its weights come once."""

    count: int = 1
    order: Literal["row", "zigzag"] = "zigzag"

    @property
    def takes_turns(self) -> bool:
        """Whether several micro-batches read a weight that was brought once."""
        return self.order == "zigzag" and self.count > 1

    def fault(self, batch: int) -> str:
        """Return the first contradiction, as the field and the reason; "" for none."""
        return "" if batch % self.count == 0 else (
            f"micro_batches.count: {self.count} do not divide a batch of {batch} (plan.workload.batch)")

    @property
    def fetches(self) -> int:
        """How many times a step brings each streamed weight."""
        return self.count if self.order == "row" else 1
