"""Activation checkpoints: of a share of the tokens a staged cache keeps what K and V are made of."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.kernels.formats.table import checkpoint_format
from forebay.rewriter.ir.schedule.cache_placement import CachePlacement


@dataclass(frozen=True)
class Recomputation:
    """A staged cache holds what K and V are made of for `checkpoints` of every `period` stretches of tokens, in blocks
    of `block_tokens` tokens as large as the others (HybridServe, section 4.1); K and V of these are made anew when the
    cache has been loaded. A stretch is as long as the longer of the two kinds of blocks. Checkpoints are kept as they
    are, or in a `format` (act8)."""

    checkpoints: int = 0
    period: int = 0
    block_tokens: int = 0
    format: str = "native"

    def keeps(self, stretch: int) -> bool:
        """Return whether of a stretch, counted from a sequence's first, checkpoints are kept: evenly spread."""
        if not self.checkpoints:
            return False
        return (stretch + 1) * self.checkpoints // self.period > stretch * self.checkpoints // self.period

    def fault(self, cache: CachePlacement) -> str:
        """Return the first contradiction, as the field and the reason; "" for none."""
        if self.checkpoints < 0 or (self.checkpoints and not cache.staged):
            return cache.further_off("recomputation.checkpoints", self.checkpoints)
        try:
            checkpoint_format(self.format)
        except ValueError as error:
            return f"recomputation.format: {error}"
        if self.format != "native" and not self.checkpoints:
            return (f"recomputation.format: {self.format} of no checkpoints "
                    "(plan.schedule.batching.recomputation.checkpoints)")
        if self.checkpoints and not (self.checkpoints <= self.period and self.block_tokens > 0):
            return (f"recomputation.checkpoints: {self.checkpoints} of a period of {self.period}, in blocks of "
                    f"block_tokens {self.block_tokens}, are no share of the cache")
        return ""
