"""Addresses of what lives as long as a phase: resident weights, constants, staging slots, caches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from forebay.rewriter.ir.alignment import ALIGNMENT, PAGE_NBYTES, aligned, slot_stride
from forebay.rewriter.ir.plan import BufferPlacement, Plan


def lay_out(
    plan: Plan, constants: Mapping[str, int], caches: Mapping[str, Mapping[str, int]], upper: int, height: int,
    staged: Iterable[tuple] = (),
) -> Plan:
    """Give slots, resident weights, constants and cache their addresses from the bottom of each arena, which begins at
    a page; where a prefill borrows from the cache, twice, once for each phase.

    constants and, by phase, caches are bytes by name; `upper` are the device's bytes from the bottom of the cache up,
    `height` those of the rows of a lookup; `staged` what staged caches take, as arguments of a buffer's placement.
    """
    buffers: list[BufferPlacement] = []
    ends = {"device": 0, "host": 0, "cache": 0}

    def put(name: str, kind: str, arena: str, nbytes: int, alignment: int = ALIGNMENT, phase: str = "all") -> None:
        offset = -(-ends[arena] // alignment) * alignment
        buffers.append(BufferPlacement(name, kind, arena, offset, nbytes, phase))  # type: ignore[arg-type]
        ends[arena] = offset + nbytes

    if plan.schedule.slot_nbytes:  # first, where their pages leave no gap
        stride = slot_stride(plan.schedule.slot_nbytes)
        for i in range(plan.schedule.slots):
            put(f"slot{i}", "slot", "device", stride, PAGE_NBYTES)
        if plan.schedule.host_hop:
            for i in range(plan.schedule.slots):
                put(f"host_slot{i}", "slot", "host", stride, PAGE_NBYTES)
    for buffer in sorted(staged, key=lambda given: (-given[-1], given[3] % PAGE_NBYTES > 0)):  # no page begins in a gap
        put(*buffer)
    for w in plan.weights:
        if w.tier != "disk":
            put(w.name, "weight", w.tier, w.nbytes)
    for name, nbytes in constants.items():
        put(name, "constant", "device", nbytes)
    bottom = aligned(ends["device"])
    for phase, cache in caches.items():
        ends["device"] = bottom
        for name, nbytes in cache.items():
            put(name, "cache", "device", nbytes, phase=phase)
    if plan.schedule.host_hop and any(w.gather for w in plan.weights):
        put("host_rows", "io", "host", height, PAGE_NBYTES)
    arenas = {"device": bottom + upper}
    if ends["host"]:
        arenas["host"] = ends["host"]
    return replace(plan, buffers=tuple(buffers), arenas=arenas)
