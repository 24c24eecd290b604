"""Hidden states that leave the device between turns: their memory on other tiers, and the bytes that a prefill
moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

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
from forebay.rewriter.ir.plan import TIERS, Plan
from forebay.rewriter.ir.prefill_chunks import chunk_steps
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.hidden_placement import HiddenPlacement
from forebay.rewriter.planning.features.feature import FeatureBuffer, ScheduleFeature, ScheduleRequest, Trial
from forebay.rewriter.planning.objective import latency_s
from forebay.rewriter.planning.options import Options
from forebay.rewriter.predict.closed_form import CacheMoves

HIDDEN_SLOTS = 3  # regions for hidden states: one is computed in, one is stored, one is loaded
MIN_WEIGHTS_SHARE = 0.5  # of a prefill's time: where weights take less, fewer passes over them save little


def hidden_buffers(batching: BatchSchedule, layout: Layout | None, host_hop: bool) -> Iterator[FeatureBuffer]:
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


def hidden_moves(moves: CacheMoves, layout: Layout | None, batching: BatchSchedule, layers: int) -> CacheMoves:
    """Return the bytes that a step moves with the hidden states of `layout`, without caches: in each layer all of a
    region comes, and the largest of its buffers, which the layer changes, goes."""
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


def explain_hidden(plan: Plan) -> tuple[str, str] | None:
    """Describe the tiers of a prefill's hidden states."""
    homes = plan.schedule.batching.hidden_homes()
    shares = ", ".join(f"{homes.count(tier)} on the {tier}" for tier in TIERS if tier in homes)
    text = f"between turns of a prefill those of {shares}, of {len(homes)} micro-batches"
    return ("hidden", text) if plan.schedule.batching.hidden.tier != "device" else None


def try_hidden_states(best: Plan, trial: Trial) -> Plan:
    """Simulate the schedule of `best` with hidden states off the device, on the fastest tier that has room, where its
    cache is there too, a prompt comes in chunks and bringing the weights for each takes most of a prefill: for larger
    ones they come fewer times."""
    batching, options = best.schedule.batching, trial.options
    chunks = chunk_steps(best.workload.effective_lengths(batching)[0], best.schedule.prefill_chunks)
    if options.hidden_tier is not None or options.prefill_chunk or sum(chunks.values()) == 1 or not (
            batching.cache.staged and batching.micro_batches.order == "zigzag") or batching.admitted:
        return best
    brought_s = sum(chunks.values()) * best.prediction.streamed_nbytes / trial.bytes_per_s
    tiers: tuple[Literal["host", "disk"], ...] = ("host", "disk")
    for tier in tiers[0 if best.budget.host != 0 else 1 :]:
        away = placed(batching, replace(options, hidden_tier=tier))
        if brought_s >= MIN_WEIGHTS_SHARE * best.prediction.prefill_time_s and offloaded_regions(away) and (
                plan := trial.simulate(away)) is not None:
            return min(best, plan, key=latency_s)
    return best


def asked_tiers(batching: BatchSchedule, request: ScheduleRequest) -> Iterator[BatchSchedule]:
    """Place the hidden states of all micro-batches but one on the requested tiers."""
    yield placed(batching, request.options)


def placed(batching: BatchSchedule, options: Options) -> BatchSchedule:
    """The schedule with hidden states of its micro-batches on the tiers that are asked for; of one they stay."""
    count = batching.micro_batches.count
    if options.hidden_tier in (None, "device") or count == 1:
        return batching
    device, host = (int(share * count) for share in options.hidden_shares or (0.0, 0.0))
    host = 0 if options.hidden_tier == "host" else host
    slots = max(1, min(HIDDEN_SLOTS, count - device - 1))
    return replace(batching, hidden=HiddenPlacement(options.hidden_tier, slots, device, host))


HIDDEN_STATES = ScheduleFeature("hidden", candidates=asked_tiers, buffers=hidden_buffers, moves=hidden_moves,
                                explain=explain_hidden, improve=try_hidden_states)
