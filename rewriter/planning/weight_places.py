"""Tiers of the weights that do not stay on the device."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from forebay.rewriter.ir.alignment import aligned
from forebay.rewriter.ir.plan import WeightPlacement
from forebay.rewriter.planning.expert_pools import is_table
from forebay.rewriter.planning.model_needs import WeightUse
from forebay.rewriter.planning.step_streams import ChunkRoom
from forebay.rewriter.planning.tiles import tile_rows_of


def place_weight(u: WeightUse, resident: bool, fit: ChunkRoom, tier: str, on_host: bool) -> WeightPlacement:
    if resident:
        return WeightPlacement(u.name, "device", u.nbytes, u.format)
    tile_rows = tile_rows_of(u, fit.slot_nbytes) if u.product and fit.slots else 0
    if on_host:
        return WeightPlacement(u.name, "host", u.nbytes, u.format, tile_rows=tile_rows, on_host=True)
    return WeightPlacement(u.name, tier, u.nbytes, u.format, tile_rows=tile_rows, gather=u.lookup,  # type: ignore[arg-type]
                           pool_slots=fit.pool_slots if is_table(u) else 0)


def fill_host(
    weights: list[WeightPlacement], room: int, pools: bool = False, whole: Collection[str] = ()
) -> list[WeightPlacement]:
    """Move weights with `pools`, or without, from disk to host memory while it lasts, last those of which few rows are
    read at a time; a step reads those of `whole` whole."""
    away = set()
    for w in sorted(weights, key=lambda w: w.gather and w.name not in whole):
        if w.tier == "disk" and (w.pool_slots > 0) == pools and aligned(w.nbytes) <= room:
            room -= aligned(w.nbytes)
            away.add(w.name)
    return [replace(w, tier="host") if w.name in away else w for w in weights]


def read_in_place(w: WeightPlacement) -> WeightPlacement:
    """Return the placement where the device reads a weight in host memory, if it lies there."""
    return replace(w, tile_rows=0, gather=False, in_place=True) if w.tier == "host" else w
