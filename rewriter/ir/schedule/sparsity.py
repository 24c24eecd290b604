"""Decode steps that read some blocks of the KV cache alone."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.rewriter.ir.schedule.cache_placement import CachePlacement
from forebay.rewriter.ir.schedule.recomputation import Recomputation


@dataclass(frozen=True)
class Sparsity:
    """Decode steps read such a share of the `blocks` of each sequence's staged cache, those with the largest weights by
    means of their keys (as Quest has it, arXiv 2406.10774); 1 reads all."""

    blocks: float = 1.0

    def fault(self, cache: CachePlacement, recomputation: Recomputation) -> str:
        """Return the first contradiction, as the field and the reason; "" for none."""
        if not 0 < self.blocks <= 1:
            return f"sparsity.blocks: {self.blocks} must be a share above 0 and at most 1"
        others = cache.on_device or cache.stays_on_host or recomputation.checkpoints
        if self.blocks < 1 and (others or not cache.staged):
            return ("sparsity.blocks: blocks are chosen of caches that all come to the device from a slower tier "
                    "(cache.tier), without cache.on_device, cache.cpu_attention, cache.in_place or "
                    "recomputation.checkpoints")
        return ""
