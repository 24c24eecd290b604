"""The state that a server's page and metrics show: planned and measured memory, requests, and the times of the last
ones.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from forebay.commands.process_memory import anonymous_nbytes
from forebay.drafting import plans_in_budget
from forebay.rewriter.ir.plan import KEPT
from forebay.serving.batcher import Batcher, Pending


def memory(batcher: Batcher) -> dict[str, Any]:
    """Bytes: the budget of the device, what the plan and that of what drafts have there by kind, and this process's
    anonymous memory."""
    lm = batcher.lm
    plans = plans_in_budget(lm)
    held = [b for plan in plans for b in plan.buffers_of("decode") if b.arena == "device"]
    kinds = {kind: sum(b.nbytes for b in held if b.kind == kind) for kind in KEPT}
    return {"budget_nbytes": sum(plan.budget.device for plan in plans), "kinds": kinds,
            "arenas": {tier: sum(plan.arenas.get(tier, 0) for plan in plans) for tier in lm.plan.arenas},
            "streamed_nbytes_per_step": lm.plan.prediction.streamed_nbytes, "process_nbytes": anonymous_nbytes()}


def state(batcher: Batcher) -> dict[str, Any]:
    """The page's view: memory, slots, and the requests under way and ended, in seconds before now."""
    now = time.monotonic()
    running = list(batcher.running.values())
    return {"memory": memory(batcher), "batch_slots": batcher.lm.plan.workload.batch, "waiting": batcher.waiting,
            "running": len(running), "most_waiting": batcher.most_waiting,
            "requests": [_times(p, now) for p in (*list(batcher.recent), *running)]}


def _times(pending: Pending, now: float) -> dict[str, Any]:
    ago = {name: round(now - at, 3) if (at := getattr(pending, name)) else None
           for name in ("arrived_s", "entered_s", "first_s", "ended_s")}
    return {**ago, "prompt_tokens": len(pending.ids), "tokens": len(pending.answer.ids)}


def gauges(batcher: Batcher) -> dict[str, tuple[str, Mapping[str, float]]]:
    """Return the current values of the metrics' gauges."""
    found, prefixes = memory(batcher), batcher.lm.prefixes
    return {
        "requests_running": ("Requests in slots.", {"": len(batcher.running)}),
        "requests_waiting": ("Requests that wait for a place.", {"": batcher.waiting}),
        "batch_slots": ("Slots of the plan.", {"": batcher.lm.plan.workload.batch}),
        "budget_bytes": ("The device's budget.", {"": found["budget_nbytes"]}),
        "planned_bytes": ("Memory of the plan by tier.", {f'tier="{t}"': n for t, n in found["arenas"].items()}),
        "prefix_cache_bytes": ("Prompts that need not be computed again.", {
            "": 0 if prefixes is None else prefixes.nbytes}),
        "prefix_disk_bytes": ("The same, in files of --cache-dir.", {
            "": 0 if prefixes is None or prefixes.slower is None else prefixes.slower.nbytes}),
        "process_anonymous_bytes": ("Anonymous memory of the process.", {"": found["process_nbytes"]}),
    }
