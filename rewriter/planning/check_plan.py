"""Whether a plan, perhaps edited by hand, suits the model: its weights, and memory for all that is kept."""

from __future__ import annotations

from collections.abc import Iterator

from forebay.rewriter.ir.plan import BufferPlacement, Plan, PlanError
from forebay.rewriter.planning.planner import Facts


def check_plan(plan: Plan, facts: Facts) -> None:
    """Raise PlanError, naming the field, where `plan` has other weights than the model, in other sizes or formats, or
    gives no memory to a resident weight, a constant, the cache or the staging slots.

    Whether what is placed lies well is the verifier's task.
    """
    _check_weights(plan, facts)
    if "device" not in plan.arenas:
        raise PlanError("plan.arenas: there is no device arena")
    for phase in ("prefill", "decode"):
        have: dict[tuple[str, str], BufferPlacement] = {
            (b.kind, b.name): b for b in plan.buffers_of(phase) if b.kind != "activation"}
        for kind, needed in (("constant", facts.constants), ("cache", _cache(plan, facts, phase))):
            for name, nbytes in needed.items():
                _require(have.get((kind, name)), name, f"{kind} buffer", "device", nbytes, phase)
        for w in plan.weights:
            if w.tier != "disk" and w.nbytes:
                _require(have.get(("weight", w.name)), w.name, "weight buffer", w.tier, w.nbytes, phase)
        for name, arena in _slots(plan, facts):
            _require(have.get(("slot", name)), name, "slot buffer", arena, plan.schedule.slot_nbytes, phase)


def _check_weights(plan: Plan, facts: Facts) -> None:
    used = {u.name: u for u in facts.uses}
    for i, w in enumerate(plan.weights):
        at, use = f"plan.weights[{i}]", used.pop(w.name, None)
        if use is None:
            raise PlanError(f"{at}.name: the model has no weight {w.name}; plan again")
        if (w.nbytes, w.format) != (use.nbytes, use.format):
            raise PlanError(f"{at}: {w.name} has {w.nbytes} bytes in format {w.format}, but the model's has "
                            f"{use.nbytes} in format {use.format}; plan again")
        if w.tier != "device" and w.gather != use.lookup:
            raise PlanError(f"{at}.gather: {w.name} is {'' if use.lookup else 'not '}read by row; plan again")
        if w.tile_rows and (w.tier == "device" or not use.product or not use.tileable):
            raise PlanError(f"{at}.tile_rows: {w.name} cannot be streamed in row tiles; it must be 0")
        tile_nbytes = use.nbytes // max(1, use.rows) * min(w.tile_rows or use.rows, use.rows)
        if w.tier != "device" and use.product and tile_nbytes > plan.schedule.slot_nbytes:
            raise PlanError(f"{at}.tile_rows: tiles of {w.name} are {tile_nbytes} bytes, a staging slot has "
                            f"{plan.schedule.slot_nbytes}; fewer rows fit")
    if used:
        raise PlanError(f"plan.weights: the model's {next(iter(used))} is missing ({len(used)} in all); plan again")


def _cache(plan: Plan, facts: Facts, phase: str) -> dict[str, int]:
    return dict(facts.cache_prompt if plan.lends and phase == "prefill" else facts.cache)


def _slots(plan: Plan, facts: Facts) -> Iterator[tuple[str, str]]:
    """Name and arena of every staging slot that the plan's streamed products need."""
    products = {u.name for u in facts.uses if u.product}
    if not any(w.tier != "device" and w.name in products for w in plan.weights):
        return
    for i in range(plan.schedule.slots):
        yield f"slot{i}", "device"
        if plan.schedule.host_hop:
            yield f"host_slot{i}", "host"


def _require(
    found: BufferPlacement | None, name: str, what: str, arena: str, nbytes: int, phase: str
) -> BufferPlacement:
    if found is None or found.arena != arena or found.nbytes < nbytes:
        have = "has none" if found is None else f"has {found.nbytes} in the {found.arena} arena"
        raise PlanError(f"plan.buffers: {name} needs a {what} of {nbytes} bytes in the {arena} arena during {phase}, "
                        f"the plan {have}; plan again")
    return found
