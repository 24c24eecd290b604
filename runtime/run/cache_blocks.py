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
        self.batch, self.each = plan.workload.batch, each
        self.tail = torch.zeros(plan.workload.batch, dtype=torch.int64)

    def step(
        self, start: torch.Tensor, tokens: int, places: torch.Tensor | None = None
    ) -> Mapping[str, torch.Tensor]:
        """The inputs of a step over `tokens` tokens from `start` [B] on, of all sequences, or of those in `places` [B].
        ValueError for a start behind the tail: what stands between would be of nobody."""
        tail = self.tail if places is None else self.tail[places]
        first, behind = start // self.tokens, (start + tokens) // self.tokens
        if bool((first > tail).any()) or bool((start < 0).any()) or bool((behind >= self.blocks).any()):
            raise ValueError(f"start: {start.tolist()} does not continue sequences whose tails are blocks "
                             f"{tail.tolist()} of {self.blocks}")
        number = torch.arange(self.blocks)
        if places is None:  # a micro-batch has a part of the file, and its sequences stand in the slot as they do there
            in_slot = in_file = torch.arange(self.batch) % self.each * self.blocks
            own = torch.ones(self.batch, dtype=torch.bool)
        else:
            in_slot, in_file = torch.arange(len(places)) * self.blocks, places * self.blocks
            own = torch.tensor([place not in places[:i] for i, place in enumerate(places)])  # the rest are repeated
        rows = in_file[:, None] + number
        begun = (number == first[:, None]) & (start % self.tokens > 0)[:, None] & (first != tail)[:, None]
        loaded = (number < first[:, None]) | begun  # the block it begins in left the tail before: it is in the file
        stored = (number >= first[:, None]) & (number < behind[:, None]) & own[:, None]
        if places is None:
            self.tail = behind
        else:
            self.tail[places] = behind
        return {"cache_loads": torch.where(loaded, rows, -1).flatten(),
                "cache_stores": torch.where(stored, rows, -1).flatten(),
                "cache_before": in_slot + tail, "cache_behind": in_slot + behind}
