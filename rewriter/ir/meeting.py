"""The meeting point of a plan's cache and its activations, which grow towards each other."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.rewriter.ir.plan import Plan


@dataclass(frozen=True)
class Meeting:
    """The meeting point of the cache, which grows up, and a decode step's activations, which grow down.

    `cache_top` and `activation_base` are byte addresses of the device arena: where the planned cache ends, and the
    lowest activation. With `sequences` sequences they would meet at `tokens` cached tokens each.
    """

    cache_top: int
    activation_base: int
    tokens: int
    sequences: int


def meeting_of(plan: Plan) -> Meeting | None:
    """Return the meeting point of cache and activations in a decode step of `plan`; None without a cache on the
    device."""
    here = [b for b in plan.buffers_of("decode") if b.arena == "device"]
    cache = [b for b in here if b.kind == "cache" and not plan.schedule.batching.cache.staged]
    if not cache:
        return None
    top = max(b.offset + b.nbytes for b in cache)
    moving = [b.offset for b in plan.buffers
              if b.arena == "device" and b.phase in ("decode", "speculative") and b.kind != "cache"]
    base = min(moving, default=plan.arenas.get("device", top))
    per_token = max(1, sum(b.nbytes for b in cache) // plan.workload.context)
    return Meeting(top, base, plan.workload.context + (base - top) // per_token, plan.workload.batch)
