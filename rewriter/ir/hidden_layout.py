"""Hidden states that leave the device between turns: the buffers they wait in, on each tier."""

from __future__ import annotations

from collections.abc import Iterable

from forebay.rewriter.ir.alignment import whole_pages
from forebay.rewriter.ir.cache_layout import CACHE_STAGING
from forebay.rewriter.ir.plan import BufferPlacement
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule

HIDDEN_STAGING = "hidden"  # of regions that micro-batches share
HIDDEN_STORE_STAGING = "hidden_out"  # host staging buffers of stores to disk, where copies hop
HIDDEN_HOME_ARENAS = {"host": "host", "disk": CACHE_STAGING}  # by the tier that hidden states are on between turns


def hidden_home_name(tier: str) -> str:
    """The buffer of hidden states that wait on a tier, one micro-batch after the other."""
    return f"{HIDDEN_STAGING}_{tier}"


def region_buffers(buffers: Iterable[BufferPlacement], batching: BatchSchedule) -> dict[str, BufferPlacement]:
    """The buffers of the first region that micro-batches share, by the name that they have in any; none where no
    hidden states leave the device."""
    if batching.hidden.tier == "device":
        return {}
    end = f"@{batching.hidden_homes().count('device')}"
    return {b.name.removesuffix(end): b for b in buffers if b.kind == "activation" and b.name.endswith(end)}


def offloaded_regions(batching: BatchSchedule) -> dict[int, tuple[int, str]]:
    """The region, counted from the first that is shared, and the tier of each micro-batch that leaves it to another."""
    regions, homes = batching.hidden_regions(), batching.hidden_homes()
    staying = homes.count("device")
    return {k: (region - staying, homes[k]) for k, region in enumerate(regions) if regions.count(region) > 1}


def hidden_home_nbytes(buffers: Iterable[BufferPlacement], batching: BatchSchedule) -> dict[str, int]:
    """Bytes of each tier for the hidden states that wait there, in whole pages."""
    each = sum(whole_pages(b.nbytes) for b in region_buffers(buffers, batching).values())
    tiers = [tier for _, tier in offloaded_regions(batching).values()] if each else []
    return {tier: each * tiers.count(tier) for tier in HIDDEN_HOME_ARENAS if tier in tiers}
