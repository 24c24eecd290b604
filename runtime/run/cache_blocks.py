"""Which blocks of a staged cache a step loads and stores, from where its sequences stand."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from forebay.kernels.formats.key_means import chosen_count
from forebay.rewriter.ir.cache_layout import (
    BEFORE,
    BEGUN,
    BEHIND,
    CHECKPOINTED,
    LOADS,
    RESTORED,
    STORES,
    WHOLE_LOADS,
    WHOLE_STORES,
    window_of_loads,
)
from forebay.rewriter.ir.plan import Plan


class _BlocksOfOneKind:
    """The blocks of one kind, of K and V or of checkpoints, that a sequence has in a slot: `numbers` [blocks] count
    them from its first token on, in blocks of `tokens` tokens, below 0 where one is nobody's; `kept` [blocks] are
    their rows where the cache lives, below 0 for those that are not kept."""

    def __init__(self, tokens: int, numbers: list[int], kept: list[int], batch: int) -> None:
        self.tokens, self.numbers, self.kept = tokens, torch.tensor(numbers), torch.tensor(kept)
        self.tail = torch.zeros(batch, dtype=torch.int64)  # by sequence, the number of the block that is not full yet

    def moved(self, start: torch.Tensor, behind: torch.Tensor, tail: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether blocks [B, blocks] are loaded and stored by a step from tokens `start` [B] up to `behind` [B],
        whose tails were the blocks `tail`: the block that it begins in is loaded if it left its tail before."""
        number, first = self.numbers, start // self.tokens
        begun = (number == first[:, None]) & (start % self.tokens > 0)[:, None] & (first != tail)[:, None]
        stored = (number >= first[:, None]) & (number < (behind // self.tokens)[:, None])
        there = (number >= 0) & (self.kept >= 0)
        return ((number < first[:, None]) | begun) & there, stored & there

    def seen(self, lowest: torch.Tensor) -> torch.Tensor:
        """Return whether blocks [B, blocks] hold tokens from `lowest` [B] on."""
        return (self.numbers + 1) * self.tokens > lowest[:, None]

    def row(self, number: torch.Tensor) -> torch.Tensor:
        """The row of a sequence's slot that has the block of this number, the last row where none has."""
        found = self.numbers == number[..., None]
        return torch.where(found.any(-1), found.int().argmax(-1), len(self.numbers) - 1)


class CacheBlocks:
    """Knows for every sequence which block its tail holds; all below it are where the cache lives.

    A step may begin anywhere up to where the last one ended: what it then writes anew replaces what was there.
    """

    def __init__(self, plan: Plan) -> None:
        batching, context = plan.schedule.batching, plan.workload.context
        self.batching, self.tokens, self.blocks = batching, batching.cache.block_tokens, batching.cache_blocks(context)
        self.batch, self.each = plan.workload.batch, plan.workload.batch // batching.micro_batches.count
        self.kept = batching.kept_blocks(context)
        numbers, rows = list(range(self.blocks)), iter(range(self.kept))
        kept = [-1 if batching.holds_checkpoints(n) else next(rows) for n in numbers]
        self.kinds = [_BlocksOfOneKind(self.tokens, numbers, kept, self.batch)]
        if batching.recomputation.checkpoints:
            each = batching.stretch // batching.recomputation.block_tokens
            of = [n for n in range((context // batching.stretch + 1) * each) if batching.recomputation.keeps(n // each)]
            self.kinds.append(_BlocksOfOneKind(batching.recomputation.block_tokens, [*of, -1], [*rows, -1], self.batch))
        self.whole = batching.cache.cpu_attention
        self.share = batching.sparsity.blocks  # that steps over one token read
        self.windows = {b.name: window_of_loads(b.name) for b in plan.buffers if b.name.startswith(LOADS)}

    def stand_at(self, tokens: int, slot: int | None = None) -> None:
        """Take all sequences, or that in a slot, to have so many tokens, whatever stands in their blocks."""
        for kind in self.kinds:
            kind.tail[slice(None) if slot is None else slot] = tokens // kind.tokens

    def rows(self, first: int, end: int) -> list[int]:
        """The rows, where its cache lives, of a sequence's blocks within tokens [first, end)."""
        return [row for kind in self.kinds
                for number, row in zip(kind.numbers.tolist(), kind.kept.tolist(), strict=True)
                if row >= 0 and first <= number * kind.tokens and (number + 1) * kind.tokens <= end]

    def step(
        self, start: torch.Tensor, tokens: int, batch_slots: torch.Tensor | None = None
    ) -> Mapping[str, torch.Tensor]:
        """The inputs of a step over `tokens` tokens from `start` [B] on, of all sequences, or of those in
        `batch_slots` [B]. ValueError for a start behind the tail: what stands between would be of nobody."""
        chosen = slice(None) if batch_slots is None else batch_slots
        tails, behind = [kind.tail[chosen].clone() for kind in self.kinds], start + tokens
        tail = tails[0]
        if bool((start // self.tokens > tail).any()) or bool((start < 0).any()) or bool(
                (behind // self.tokens >= self.blocks).any()):
            raise ValueError(f"start: {start.tolist()} does not continue sequences whose tails are blocks "
                             f"{tail.tolist()} of {self.blocks}")
        if batch_slots is None:
            group = self.each  # a micro-batch has a part of its own, its sequences in the slot as they are there
            number = in_home = torch.arange(self.batch) % group
            own = torch.ones(self.batch, dtype=torch.bool)
        else:
            group, number, in_home = len(batch_slots), torch.arange(len(batch_slots)), batch_slots
            # The rest are repeated.
            own = torch.tensor([slot not in batch_slots[:i] for i, slot in enumerate(batch_slots)])
        moved = [kind.moved(start, behind, before) for kind, before in zip(self.kinds, tails, strict=True)]
        rows = [in_home[:, None] * self.kept + kind.kept for kind in self.kinds]
        for kind in self.kinds:
            kind.tail[chosen] = behind // kind.tokens
        if self.share < 1 and tokens == 1:
            return self._chosen(start, tail)
        found = {
            STORES: self._table([stored & own[:, None] for _, stored in moved], rows, group),
            BEFORE: self._tails(number, tails, group),
            BEHIND: self._tails(number, [behind // kind.tokens for kind in self.kinds], group)}
        if self.whole:  # all that is there, and all that is touched
            count = torch.arange(self.blocks)
            touched = (count >= (start // self.tokens)[:, None]) & (count * self.tokens < behind[:, None])
            found[WHOLE_LOADS] = self._table([count * self.tokens < start[:, None]], rows, group)
            found[WHOLE_STORES] = self._table([touched & own[:, None]], rows, group)
        for name, window in self.windows.items():
            # what the first query sees, the others see or see less of
            lowest = start // -window * -window if window < 0 else start - window + 1 if window else start * 0
            found[name] = self._table([loaded & kind.seen(lowest) for kind, (loaded, _) in zip(
                self.kinds, moved, strict=True)], rows, group)
        if self.batching.recomputation.checkpoints:
            found |= self._checkpoints(start, tokens, tail)
        return found

    def _chosen(self, start: torch.Tensor, tail: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The inputs of a step over one token that chooses blocks: these stand in front of a sequence's part of the
        slot, then the block that is not full. Where the tail is another, that comes from where the cache lives."""
        first, number = start // self.tokens, torch.arange(self.batch) % self.each
        place = number * self.blocks + torch.tensor([chosen_count(self.share, full) for full in first.tolist()])
        row, fills, other = number * self.blocks + first, (start + 1) % self.tokens == 0, first != tail
        stores = torch.full((self.batch * self.blocks,), -1)
        at = torch.arange(self.batch) // self.each * self.each * self.blocks + place
        stores[at[fills]] = row[fills]
        return {STORES: stores, BEFORE: place + other.long(), BEHIND: place + fills.long(),
                BEGUN: torch.where(other & (start % self.tokens > 0), row, -1)}

    @staticmethod
    def _table(chosen: list[torch.Tensor], rows: list[torch.Tensor], group: int) -> torch.Tensor:
        """The rows of those blocks that are chosen, in the order of a slot: of `group` sequences at a time those of
        each kind, -1 for the others."""
        parts = [torch.where(c, r, -1).reshape(-1, group * r.shape[1]) for c, r in zip(chosen, rows, strict=True)]
        return torch.cat(parts, 1).flatten()

    def _tails(self, number: torch.Tensor, tails: list[torch.Tensor], group: int) -> torch.Tensor:
        """The rows of a slot that the tails have, those of a sequence side by side."""
        base, found = 0, []
        for kind, tail in zip(self.kinds, tails, strict=True):
            blocks = len(kind.numbers)
            found.append(base + number * blocks + kind.row(tail))
            base += group * blocks
        return torch.stack(found, 1).flatten()

    def _checkpoints(self, start: torch.Tensor, tokens: int, tail: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the places of K and V recomputed from checkpoints (below `start`, except in the `tail` of K and V),
        and of the checkpoints of new tokens."""
        kind, last = self.kinds[1], self.blocks * self.tokens - 1
        position = (kind.numbers[:, None] * kind.tokens + torch.arange(kind.tokens)).flatten()
        restored = (position >= 0) & (position < start[:, None]) & (position // self.tokens != tail[:, None])
        token = start[:, None] + torch.arange(tokens)
        row = kind.row(token // kind.tokens)
        nobody = len(kind.numbers) - 1
        return {RESTORED: torch.where(restored, position, last)[:, None],
                CHECKPOINTED: row * kind.tokens + torch.where(row == nobody, 0, token % kind.tokens)}
