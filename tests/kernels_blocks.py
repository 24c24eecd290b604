"""A paged cache filled at random for tests: every byte that was not written is 0xFF, which reads as NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forebay.kernels.formats import paged
from forebay.kernels.formats.paged import BlockLayout


@dataclass(frozen=True)
class FilledCache:
    """Sequences of `lengths` in blocks scattered over the pool."""

    layout: BlockLayout
    pool: torch.Tensor
    table: torch.Tensor  # int32 [B, M]
    lengths: torch.Tensor  # int64 [B]


def slots_of(table: torch.Tensor, tokens: int, length: int) -> torch.Tensor:
    """Slots of positions 0 .. length - 1 of the sequence with blocks table [M]."""
    t = torch.arange(length)
    return table.long()[t // tokens] * tokens + t % tokens


def fill_cache(layout: BlockLayout, lengths: list[int], seed: int = 0, strength: float = 1.0) -> FilledCache:
    """K ~ strength N(0, 1), V ~ N(0, 1); one block more than needed in the pool and in each row of the table."""
    generator = torch.Generator().manual_seed(seed)
    most = -(-max(lengths) // layout.tokens) + 1
    count = len(lengths) * most + 1
    pool = paged.allocate(layout, count).fill_(0xFF)
    table = torch.randperm(count, generator=generator)[: count - 1].view(len(lengths), most).int()
    for row, length in zip(table, lengths, strict=True):
        shape = (length, layout.kv_heads, layout.head_dim)
        k = (strength * torch.randn(shape, generator=generator)).to(layout.dtype)
        v = torch.randn(shape, generator=generator).to(layout.dtype)
        paged.write(pool, layout, slots_of(row, layout.tokens, length), k, v)
    return FilledCache(layout, pool, table, torch.tensor(lengths))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected magnitude; NaN where one of them is not finite."""
    return ((found.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


LIMIT = {torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5}
