"""What hidden states that leave the device between turns take of the other tiers, and what a prefill step moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from forebay.rewriter.ir.alignment import PAGE_NBYTES, whole_pages
from forebay.rewriter.ir.cache_layout import STORE_STAGING_COUNT
from forebay.rewriter.ir.graph import Layout
from forebay.rewriter.ir.hidden_layout import (
    HIDDEN_HOME_ARENAS,
    HIDDEN_STAGING,
    HIDDEN_STORE_STAGING,
    hidden_home_name,
    hidden_home_nbytes,
    offloaded_regions,
    region_buffers,
)
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.predict.closed_form import CacheMoves


def hidden_buffers(layout: Layout | None, batching: BatchSchedule,
                   host_hop: bool) -> Iterator[tuple[str, str, str, int, int]]:
    """Their buffers on slower tiers, as (name, kind, arena, nbytes, alignment), from the layout of the largest prefill
    step. With `host_hop` what the disk holds passes through slots of the host's."""
    if layout is None or batching.hidden.tier == "device":
        return
    homes = hidden_home_nbytes(layout.buffers.values(), batching)
    if host_hop and "disk" in homes:
        own = region_buffers(layout.buffers.values(), batching)
        room = max(whole_pages(b.nbytes) for b in own.values())
        for name in (*(f"host_{HIDDEN_STAGING}{i}" for i in range(batching.hidden.slots)),
                     *(f"host_{HIDDEN_STORE_STAGING}{i}" for i in range(STORE_STAGING_COUNT))):
            yield name, "slot", "host", room, PAGE_NBYTES
    for tier, nbytes in homes.items():
        yield hidden_home_name(tier), "io", HIDDEN_HOME_ARENAS[tier], nbytes, PAGE_NBYTES


def with_hidden_moves(moves: CacheMoves, layout: Layout | None, batching: BatchSchedule, layers: int) -> CacheMoves:
    """What a step moves with the hidden states of `layout` beside its caches: in each layer all of a region comes, and
    the largest of its buffers, which the layer changes, goes."""
    own = region_buffers(layout.buffers.values(), batching) if layout is not None else {}
    if not own:
        return moves
    tiers, nbytes, copies = [tier for _, tier in offloaded_regions(batching).values()], dict(moves.nbytes), moves.copies
    whole, changed = sum(b.nbytes for b in own.values()), max(b.nbytes for b in own.values())
    for tier in HIDDEN_HOME_ARENAS:
        turns = layers * tiers.count(tier)
        for link, moved in (((tier, "device"), whole), (("device", tier), changed)):
            if turns:
                nbytes[link] = nbytes.get(link, 0.0) + turns * moved
        copies += turns * (len(own) + 1)
    return replace(moves, nbytes=nbytes, copies=copies, slots=max(moves.slots, batching.hidden.slots))
