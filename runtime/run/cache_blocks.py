"""Which blocks of a staged cache a step loads and stores, from where its sequences stand."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from forebay.rewriter.ir.block import BEFORE, BEHIND, LOADS, STORES, WHOLE_LOADS, WHOLE_STORES, window_of_loads
from forebay.rewriter.ir.plan import Plan


class CacheBlocks:
    """Knows for every sequence which block its tail holds; all below it are where the cache lives.

    A step may begin anywhere up to where the last one ended: what it then writes anew replaces what was there.
    """

    def __init__(self, plan: Plan) -> None:
        block = plan.schedule.block
        self.tokens, self.blocks = block.cache_tokens, block.cache_blocks(plan.workload.context)
        each = plan.workload.batch // block.micro_batches
        self.batch, self.each = plan.workload.batch, each
        self.tail = torch.zeros(plan.workload.batch, dtype=torch.int64)
        self.whole = block.cpu_attention
        self.windows = {b.name: window_of_loads(b.name) for b in plan.buffers if b.name.startswith(LOADS)}

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
        if places is None:  # a micro-batch has a part of its own, and its sequences stand in the slot as they do there
            in_slot = in_file = torch.arange(self.batch) % self.each * self.blocks
            own = torch.ones(self.batch, dtype=torch.bool)
        else:
            in_slot, in_file = torch.arange(len(places)) * self.blocks, places * self.blocks
            own = torch.tensor([place not in places[:i] for i, place in enumerate(places)])  # the rest are repeated
        rows = in_file[:, None] + number
        begun = (number == first[:, None]) & (start % self.tokens > 0)[:, None] & (first != tail)[:, None]
        loaded = (number < first[:, None]) | begun  # the block it begins in left the tail before: it is there
        stored = (number >= first[:, None]) & (number < behind[:, None]) & own[:, None]
        if places is None:
            self.tail = behind
        else:
            self.tail[places] = behind
        found = {STORES: torch.where(stored, rows, -1).flatten(), BEFORE: in_slot + tail, BEHIND: in_slot + behind}
        if self.whole:  # all that is there, and all that is touched
            found[WHOLE_LOADS] = torch.where(number * self.tokens < start[:, None], rows, -1).flatten()
            touched = (number >= first[:, None]) & (number * self.tokens < (start + tokens)[:, None]) & own[:, None]
            found[WHOLE_STORES] = torch.where(touched, rows, -1).flatten()
        for name, window in self.windows.items():
            # what the first query sees, the others see or see less of
            lowest = start // -window * -window if window < 0 else start - window + 1 if window else start * 0
            seen = (number + 1) * self.tokens > lowest[:, None]
            found[name] = torch.where(loaded & seen, rows, -1).flatten()
        return found
