"""Which of the weights that could stream stay in device memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from forebay.rewriter.ir.alignment import aligned
from forebay.rewriter.planning.model_needs import WeightUse

LIGHT_NBYTES = 1 << 20  # below this what a copy costs beside its bytes (0.1 ms of the computing thread) is a third more


def spread_resident(products: Sequence[WeightUse], room: int) -> list[WeightUse]:
    """The weights to keep resident: first fit, the light ones first, else in an order that halves the step again and
    again, so that copies always have compute beside them. The order does not depend on the room; with more of it first
    fit never keeps fewer bytes."""
    chosen = []
    for u in halving_order(tuple(products)):
        if aligned(u.nbytes) <= room:
            chosen.append(u)
            room -= aligned(u.nbytes)
    return chosen


@functools.lru_cache(maxsize=8)
def halving_order(products: tuple[WeightUse, ...]) -> tuple[WeightUse, ...]:
    """Products by the reversed bits of their number: the middle, the quarters, the eighths, and so on; before all
    others those that are light."""
    width = max(1, (len(products) - 1).bit_length())
    ranks = [int(format(i, f"0{width}b")[::-1], 2) for i in range(len(products))]
    return tuple(u for _, u in sorted(
        zip(ranks, products, strict=True), key=lambda pair: (pair[1].nbytes > LIGHT_NBYTES, pair[0])))
