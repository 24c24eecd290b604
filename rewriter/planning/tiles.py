"""Into how many tiles of rows weights are cut that stream through slots."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from forebay.rewriter.ir.alignment import aligned
from forebay.rewriter.planning.model_needs import WeightUse

# A tile's columns of the result begin at a multiple of one of these, the first that leaves the number of tiles: at odd
# ones a GPU's products write 2 bytes at a time and take three times as long (H200, fp16, 2048 x 255 x 16384).
WHOLE_ROWS = (128, 64, 32, 16, 8)


def most_tiles(products: Sequence[WeightUse], slot: int) -> int:
    """The most tiles that any layer, or any weight outside the layers one at a time, comes in."""
    counts: Counter[int] = Counter()
    for u in products:
        for layer in u.layers:
            counts[layer] += tile_count(u, slot)
    return max([1, *counts.values()])


def room_beside_slots(order: Sequence[WeightUse], room: int, slots: int, slot: int) -> int:
    """Bytes for resident weights, at most `room`, that leave no layer more tiles to stream than so many slots hold; -1
    where more are needed. Weights become resident in this order, so they are sums of the first of them."""
    sums = [0, *accumulate(aligned(u.nbytes) for u in order)]
    least = bisect_left(range(len(sums)), True, key=lambda kept: most_tiles(order[kept:], slot) <= slots)
    return sums[bisect_right(sums, room) - 1] if sums[least] <= room else -1


def tile_count(u: WeightUse, slot: int) -> int:
    """Tiles of a weight that fill slots of `slot` bytes at most."""
    return -(-u.rows // (slot // (u.nbytes // u.rows))) if u.nbytes > slot else 1


def tile_rows_of(u: WeightUse, slot: int) -> int:
    """Rows of a tile: as few as their number allows, rounded up as far as it and the slot allow; 0 for a whole weight.
    """
    count = tile_count(u, slot)
    if count == 1:
        return 0
    even, most = -(-u.rows // count), slot // (u.nbytes // u.rows)
    whole = (-(-even // step) * step for step in WHOLE_ROWS)
    return next((rows for rows in whole if rows <= most and -(-u.rows // rows) == count), even)
