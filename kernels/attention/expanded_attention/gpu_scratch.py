"""The memory of `expanded_attention` on a GPU; without Triton, so that plans count it."""

from __future__ import annotations

from typing import NamedTuple

from forebay.kernels.attention.decode_attention.decode_shares import processors
from forebay.kernels.attention.expanded_attention.reference import ExpandedSizes
from forebay.kernels.products.linear.selection import HELD_COUNTERS_NBYTES

LOT_NBYTES = 64 << 20  # of keys and values at a time, where that is a head or more and fills the multiprocessors
TILE_ROWS = 128  # query rows of a program of `prefill_attention`
ALIGN = 16  # numbers; a part begins at a multiple of so many


class ScratchNeed(NamedTuple):
    """Heads at a time; numbers of a key, to which queries are widened; where values, unpacked rows and wider queries
    begin after the keys, in numbers; and bytes of all."""

    heads: int
    wide: int
    values_at: int
    rows_at: int
    queries_at: int
    nbytes: int


def scratch_need(sizes: ExpandedSizes, itemsize: int, packed: bool) -> ScratchNeed:
    """Return the scratch of a use.

    Tiles of values are read as wide as keys are: the last one reads as much more, which no result depends on."""
    batch, heads, queries, length, rank, dim, plain, value = sizes
    wide = max(dim, value)
    each = max(1, batch * length * (wide + value) * itemsize)
    fills = -(-processors() // max(1, batch * -(-queries // TILE_ROWS)))
    lots = -(-heads // min(heads, max(1, LOT_NBYTES // each, fills))) if heads else 1
    together = -(-heads // lots)
    values_at = _aligned(batch * together * length * wide)
    rows_at = values_at + _aligned(batch * together * length * value + wide)
    queries_at = rows_at + (_aligned(batch * length * (rank + dim - plain)) if packed else 0)
    end = queries_at + (_aligned(batch * heads * queries * wide) if wide > dim else 0)
    return ScratchNeed(together, wide, values_at, rows_at, queries_at, end * itemsize)


def workspace_nbytes(sizes: ExpandedSizes, itemsize: int, packed: bool) -> int:
    """Bytes of scratch that a use takes, and of counters that are held."""
    return HELD_COUNTERS_NBYTES + scratch_need(sizes, itemsize, packed).nbytes


def _aligned(numbers: int) -> int:
    return -(-numbers // ALIGN) * ALIGN
