"""Which blocks of a cache on disk a step loads and stores, from where its sequences stand."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from forebay.rewriter.ir.plan import Plan


class CacheBlocks:
    """Knows for every sequence which block its tail holds; all below it are in the file.

    A step may begin anywhere up to where the last one ended: what it then writes anew replaces what was there.
    """

    def __init__(self, plan: Plan) -> None:
        block = plan.schedule.block
        self.tokens, self.blocks = block.cache_tokens, block.cache_blocks(plan.workload.context)
        each = plan.workload.batch // block.micro_batches
        self.first_row = torch.arange(plan.workload.batch) % each * self.blocks  # of a sequence, in its table of blocks
        self.tail = torch.zeros(plan.workload.batch, dtype=torch.int64)

    def step(self, start: torch.Tensor, tokens: int) -> Mapping[str, torch.Tensor]:
        """The inputs of a step over `tokens` tokens from `start` [B] on. ValueError for a start behind the tail: what
        stands between would be of nobody."""
        first, behind = start // self.tokens, (start + tokens) // self.tokens
        if bool((first > self.tail).any()) or bool((start < 0).any()) or bool((behind >= self.blocks).any()):
            raise ValueError(f"start: {start.tolist()} does not continue sequences whose tails are blocks "
                             f"{self.tail.tolist()} of {self.blocks}")
        number = torch.arange(self.blocks)
        rows = self.first_row[:, None] + number
        begun = (number == first[:, None]) & (start % self.tokens > 0)[:, None] & (first != self.tail)[:, None]
        loaded = (number < first[:, None]) | begun  # the block it begins in left the tail before: it is in the file
        stored = (number >= first[:, None]) & (number < behind[:, None])
        found = {"cache_loads": torch.where(loaded, rows, -1).flatten(),
                 "cache_stores": torch.where(stored, rows, -1).flatten(),
                 "cache_before": self.first_row + self.tail, "cache_behind": self.first_row + behind}
        self.tail = behind
        return found
