"""Decide where everything goes: fill the fast tier, stream the rest, issue copies as far ahead as the slots allow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from forebay.rewriter.plan import (
    Budget,
    BufferPlacement,
    CacheShare,
    Plan,
    PlanError,
    Schedule,
    WeightPlacement,
    Workload,
)
from forebay.rewriter.sizes import format_nbytes

PAGE = 4096
ALIGNMENT = 64
SMALL_NBYTES = 64 << 10  # below this a copy costs more in latency (~0.1 ms) than in bytes
SLOT_NBYTES = 4 << 20  # one read of 4 MiB is within 5 % of the best rate of an NVMe disk
MAX_SLOTS = 8
STAGING_SHARE = 0.1  # of the budget, for all slots together


@dataclass(frozen=True)
class WeightUse:
    """How the graphs consume a weight: `rows` and bytes, whether it can stream in row tiles, and how it is read."""

    name: str
    nbytes: int
    rows: int
    tileable: bool  # every streaming reader accepts row tiles
    lookup: bool  # read by row lookup
    product: bool  # read by something other than a lookup


@dataclass(frozen=True)
class PhaseNeed:
    """Bytes that a step over chunks of this many tokens takes beside weights and cache."""

    activations: int
    workspace: int


@dataclass(frozen=True)
class Wishes:
    """Choices the user forces; None leaves them to the planner."""

    slots: int | None = None
    slot_nbytes: int | None = None
    lead: int | None = None
    prefill_chunk: int | None = None
    reuse: bool = True


@dataclass(frozen=True)
class Facts:
    """What the planner must know of a model and workload. `uses` stand in the order a step reads them."""

    fingerprint: str
    uses: Sequence[WeightUse]
    constants: Mapping[str, int]  # name -> nbytes
    cache: Mapping[str, int]  # buffer name -> nbytes
    need: Callable[[int], PhaseNeed]  # by tokens per sequence in one step
    weight_tier: str = "disk"  # where weights come from when they are not resident
    host_hop: bool = False


def make_plan(facts: Facts, budget: Budget, workload: Workload, wishes: Wishes, machine: str) -> Plan:
    """The plan with the fewest streamed bytes over prompt and answer; PlanError names the smallest budget that works.

    Candidates are prefill chunks of the prompt halved again and again; each leaves other room for resident weights.
    """
    chunks = [wishes.prefill_chunk] if wishes.prefill_chunk else _halvings(workload.prompt)
    best: Plan | None = None
    best_cost = math.inf
    for chunk in chunks:
        plan = _fit(facts, budget, workload, replace(wishes, prefill_chunk=min(chunk, workload.prompt)), machine)
        if plan is None:
            continue
        passes = -(-workload.prompt // plan.schedule.prefill_chunk) + workload.new_tokens - 1
        cost = passes * sum(w.nbytes for w in plan.weights if w.tier != "device" and not w.gather)
        if cost < best_cost:
            best, best_cost = plan, cost
        if cost == 0:
            break
    if best is None:
        smallest, parts = smallest_budget(facts, workload, wishes)
        if budget.host and budget.device >= smallest:
            raise PlanError(f"budget.host: {format_nbytes(budget.host)} cannot hold the slots that copies from disk "
                            "pass through on their way to the device; give more, or leave the host budget out")
        raise PlanError(
            f"a device budget of {format_nbytes(budget.device)} cannot work for batch {workload.batch}, prompt "
            f"{workload.prompt}, {workload.new_tokens} new tokens; the smallest that can is {format_nbytes(smallest)} "
            f"({smallest} bytes: {', '.join(f'{k} {format_nbytes(v)}' for k, v in parts.items())}). "
            f"A smaller batch, shorter prompts or fewer new tokens need less")
    return best


def smallest_budget(facts: Facts, workload: Workload, wishes: Wishes) -> tuple[int, dict[str, int]]:
    """The least device budget in bytes that a plan exists for, and what takes it; by bisection."""
    chunks = [wishes.prefill_chunk] if wishes.prefill_chunk else [1]

    def fit(nbytes: int) -> Plan | None:
        for chunk in chunks:
            plan = _fit(facts, Budget(nbytes), workload, replace(wishes, prefill_chunk=min(chunk, workload.prompt)), "")
            if plan is not None:
                return plan
        return None

    high = 1 << 20
    while fit(high) is None:
        high *= 2
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fit(middle) is not None else (middle, high)
    plan = fit(high)
    assert plan is not None
    parts: dict[str, int] = {}
    for b in plan.buffers:
        if b.arena == "device":
            parts[b.kind] = parts.get(b.kind, 0) + b.nbytes
    chunk = plan.schedule.prefill_chunk
    parts["activation"] = max(facts.need(chunk).activations, facts.need(1).activations)
    parts["workspace"] = max(facts.need(chunk).workspace, facts.need(1).workspace)
    return high, parts


def _fit(facts: Facts, budget: Budget, workload: Workload, wishes: Wishes, machine: str) -> Plan | None:
    """The plan for one prefill chunk, or None when it does not fit."""
    chunk = wishes.prefill_chunk or 1
    need, decode = facts.need(chunk), facts.need(1)
    activations = _aligned(max(need.activations, decode.activations)) + ALIGNMENT
    workspace = max(need.workspace, decode.workspace)
    fixed = activations + workspace + sum(_aligned(n) for n in (*facts.cache.values(), *facts.constants.values()))
    room = budget.device - fixed
    pinned = [u for u in facts.uses if _pinned(u)]
    room -= sum(_aligned(u.nbytes) for u in pinned)
    rest = [u for u in facts.uses if not _pinned(u)]
    if room < 0:
        return None
    products = [u for u in rest if u.product]
    resident = {u.name for u in pinned}
    slots = slot = 0
    if sum(_aligned(u.nbytes) for u in products) <= room:
        resident |= {u.name for u in products}
        room -= sum(_aligned(u.nbytes) for u in products)
        for u in rest:  # tables read by row come last: they cost little on disk
            if not u.product and _aligned(u.nbytes) <= room:
                resident.add(u.name)
                room -= _aligned(u.nbytes)
    else:
        chosen = _choose_slots(products, room, budget.device, wishes)
        if chosen is None:
            return None
        slots, slot = chosen
        room -= slots * _slot_stride(slot) + PAGE
        resident |= _spread(products, room)
    weights = [_place(u, u.name in resident, slot, facts.weight_tier) for u in facts.uses]
    if budget.host and facts.weight_tier == "disk":
        staging = 0  # what copies from disk pass through: slots, and the rows of a lookup
        if facts.host_hop:
            staging = slots * _slot_stride(slot) + max(need.activations, decode.activations) + 2 * PAGE
        if staging > budget.host:
            return None
        weights = _fill_host(weights, budget.host - staging)
    schedule = Schedule(
        micro_batch=workload.batch, slots=max(1, slots), slot_nbytes=slot, lead=min(wishes.lead or max(1, slots),
        max(1, slots)), prefill_chunk=chunk, reuse=wishes.reuse, host_hop=facts.host_hop)
    return _lay_out(Plan(facts.fingerprint, machine, budget, workload, schedule, tuple(weights), cache=(CacheShare(),)),
                    facts, activations, max(need.activations, decode.activations))


def _halvings(n: int) -> list[int]:
    found = []
    while n >= 1:
        found.append(n)
        n = -(-n // 2) if n > 1 else 0
    return found


def _pinned(u: WeightUse) -> bool:
    """Small weights stay resident; so does one that is only looked up, when it is small."""
    return u.nbytes <= SMALL_NBYTES and (not u.tileable or u.nbytes <= PAGE or u.rows == 1)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _slot_stride(nbytes: int) -> int:
    """Arena bytes of a slot: its contents may begin anywhere in a page, as they do in the file."""
    return -(-(nbytes + PAGE - 1) // PAGE) * PAGE


def _smallest_tile(u: WeightUse) -> int:
    row = -(-u.nbytes // max(1, u.rows))
    return max(row, min(u.nbytes, PAGE)) if u.tileable else u.nbytes


def _choose_slots(products: Sequence[WeightUse], room: int, budget: int, wishes: Wishes) -> tuple[int, int] | None:
    """Number and bytes of staging slots: as large as a good read, as many as a tenth of the budget holds."""
    least = max(_smallest_tile(u) for u in products)
    whole = max((u.nbytes for u in products if not u.tileable), default=0)
    largest = max(u.nbytes for u in products)
    staging = min(room - PAGE, max(int(budget * STAGING_SHARE), 2 * _slot_stride(max(least, whole))))
    slots = wishes.slots or max(1, min(MAX_SLOTS, staging // _slot_stride(min(largest, SLOT_NBYTES)) or 2))
    if wishes.slots is None and slots < 4:
        slots = min(4, max(1, staging // _slot_stride(max(least, whole))))
    slot = wishes.slot_nbytes or max(least, whole, min(SLOT_NBYTES, largest, staging // slots - 2 * PAGE))
    if wishes.slot_nbytes is not None and wishes.slot_nbytes < max(least, whole):
        raise PlanError(f"slot_nbytes: {wishes.slot_nbytes} is below {max(least, whole)}, the largest piece that must "
                        "stream whole")
    while slots * _slot_stride(slot) + PAGE > room:
        if wishes.slots is None and slots > 1:
            slots -= 1
        elif wishes.slot_nbytes is None and slot > max(least, whole):
            slot = max(least, whole, slot // 2)
        else:
            return None
    return slots, slot


def _spread(products: Sequence[WeightUse], room: int) -> set[str]:
    """The weights to keep resident, spread evenly over the step so that copies always have compute beside them."""
    total = sum(_aligned(u.nbytes) for u in products)
    chosen: set[str] = set()
    used = seen = 0
    for u in products:
        seen += _aligned(u.nbytes)
        if used + _aligned(u.nbytes) <= room * seen / total:
            chosen.add(u.name)
            used += _aligned(u.nbytes)
    for u in sorted(products, key=lambda u: -u.nbytes):
        if u.name not in chosen and used + _aligned(u.nbytes) <= room:
            chosen.add(u.name)
            used += _aligned(u.nbytes)
    return chosen


def _place(u: WeightUse, resident: bool, slot: int, tier: str) -> WeightPlacement:
    if resident:
        return WeightPlacement(u.name, "device", u.nbytes, offset=0)
    tile_rows = 0
    if u.product and u.nbytes > slot:
        row = u.nbytes // u.rows
        tiles = -(-u.rows // (slot // row))
        tile_rows = -(-u.rows // tiles)
    return WeightPlacement(u.name, tier, u.nbytes, tile_rows=tile_rows, gather=u.lookup)  # type: ignore[arg-type]


def _fill_host(weights: list[WeightPlacement], room: int) -> list[WeightPlacement]:
    """Move streamed weights from disk to host memory while it lasts; what is only looked up stays on disk."""
    moved = []
    for w in weights:
        if w.tier == "disk" and not w.gather and _aligned(w.nbytes) <= room:
            room -= _aligned(w.nbytes)
            w = replace(w, tier="host", offset=-1)
        moved.append(w)
    return moved


def _lay_out(plan: Plan, facts: Facts, activations: int, height: int) -> Plan:
    """Give resident weights, constants, slots and cache their addresses from the bottom of each arena."""
    buffers: list[BufferPlacement] = []
    ends = {"device": 0, "host": 0}

    def put(name: str, kind: str, arena: str, nbytes: int, alignment: int = ALIGNMENT) -> int:
        offset = -(-ends[arena] // alignment) * alignment
        buffers.append(BufferPlacement(name, kind, arena, offset, nbytes))  # type: ignore[arg-type]
        ends[arena] = offset + nbytes
        return offset

    weights = []
    for w in plan.weights:
        if w.tier != "disk":
            w = replace(w, offset=put(w.name, "weight", w.tier, w.nbytes))
        weights.append(w)
    for name, nbytes in facts.constants.items():
        put(name, "constant", "device", nbytes)
    if plan.schedule.slot_nbytes:
        stride = _slot_stride(plan.schedule.slot_nbytes)
        for i in range(plan.schedule.slots):
            put(f"slot{i}", "slot", "device", stride, PAGE)
        if plan.schedule.host_hop:
            for i in range(plan.schedule.slots):
                put(f"host_slot{i}", "slot", "host", stride, PAGE)
    for name, nbytes in facts.cache.items():
        put(name, "cache", "device", nbytes)
    if plan.schedule.host_hop and any(w.gather and w.tier == "disk" for w in weights):
        put("host_rows", "io", "host", height, PAGE)
    arenas = {"device": _aligned(ends["device"]) + activations}
    if ends["host"]:
        arenas["host"] = ends["host"]
    return replace(plan, weights=tuple(weights), buffers=tuple(buffers), arenas=arenas)
