"""Issue copies ahead of their use."""

from __future__ import annotations

from forebay.rewriter.ir.cache_layout import CACHE_STAGING, OPERANDS
from forebay.rewriter.ir.draft import Draft, Evict, Fetch, Free, Lookup, Store
from forebay.rewriter.ir.plan import Plan, PlanError
from forebay.rewriter.ir.program import Launch
from forebay.rewriter.ir.schedule.routed_fetch import AHEAD


def hoist_prefetch(draft: Draft, plan: Plan) -> None:
    """Move every Fetch up to the Free that lets it start, and Lookups of experts ahead of the router that names them.

    Weights: number j stands behind Free number j - lead, in order, and never before its slot's last contents are free.
    The first `lead` of them become the prologue, and stand again at the end of the step, for the next one; where some
    steps read experts by name, and so others than the rest, they stand at the top of their own step. PlanError where
    one launch needs more moves at once than there are slots.

    Cache: what is loaded is named by inputs of the step, so the first loads stand at its top, and each other where its
    slot is given back. That is a turn later than it was, if there are slots for it, so that stores have a turn's time.
    Loads whose rows a launch of the step names stay where they are.

    Experts: those that a layer reads ahead stand after all lookups of the layer before, and after its product with what
    their memory held. Those of the first layer stand at the top of the step.
    """
    _hoist_experts(draft)
    _hoist_weights(draft, plan)
    _hoist_cache(draft, plan.schedule.batching.cache.slots)


def _hoist_experts(draft: Draft) -> None:
    items: list = []
    after = 0
    for item in draft.items:
        if isinstance(item, Lookup) and item.span.buffer == AHEAD:
            items.insert(after, item)
            continue
        items.append(item)
        if isinstance(item, Lookup) or (isinstance(item, Launch) and any(s.buffer == AHEAD for s in item.reads)):
            after = len(items)
    draft.items = items


def _hoist_weights(draft: Draft, plan: Plan) -> None:
    moves = [index for index, move in enumerate(draft.moves) if move.ring not in (CACHE_STAGING, OPERANDS)]
    number = {index: j for j, index in enumerate(moves)}
    lead, slots, count = plan.schedule.lead, plan.schedule.slots, len(moves)
    ahead = min(lead, count)
    draft.prologue = () if plan.schedule.routed.steps else tuple(moves[:ahead])
    last_in_slot = {j % slots: j for j in range(count)}
    freed: set[int] = set()
    items: list = [] if draft.prologue else [Fetch(index) for index in moves[:ahead]]
    following, again = ahead, 0 if draft.prologue else ahead  # the next move to issue: of this step, of the next one
    for item in draft.items:
        j = number.get(item.index, -1) if isinstance(item, Fetch | Free) else -1
        if isinstance(item, Fetch) and j >= 0:
            if j < following:
                continue  # issued already
            if j >= slots and j - slots not in freed:
                raise PlanError(f"plan.schedule.slots: {slots} slots cannot hold what one operator needs at once: "
                                f"{draft.moves[item.index].label} is needed before "
                                f"{draft.moves[moves[j - slots]].label} leaves its slot; use more slots")
            following = j + 1
        items.append(item)
        if not isinstance(item, Free) or j < 0:
            continue
        freed.add(j)
        while following < count and following - lead in freed and (
                following < slots or following - slots in freed):
            items.append(Fetch(moves[following]))
            following += 1
        while following == count and again < ahead and last_in_slot[again % slots] in freed:
            items.append(Fetch(moves[again]))
            again += 1
    draft.items = items


def _hoist_cache(draft: Draft, slots: int) -> None:
    """Load n and store n of the caches are those of turn n."""
    loads = [index for index, move in enumerate(draft.moves) if move.ring == CACHE_STAGING and not move.computed]
    stores = [index for index, out in enumerate(draft.stores) if out.cache]
    turns = {index: turn for turn, index in enumerate(stores)}
    if not loads:
        return
    later = 1 if slots > 2 else 0
    items: list = [Fetch(index) for index in loads[:slots]]

    def give_back(turn: int) -> None:
        items.extend((Evict(stores[turn]), Free(loads[turn])))
        if turn + slots < len(loads):
            items.append(Fetch(loads[turn + slots]))

    ours = set(loads)
    for item in draft.items:
        if (isinstance(item, Evict) and item.index in turns) or (
                isinstance(item, Fetch | Free) and item.index in ours):
            continue
        items.append(item)
        if isinstance(item, Store) and turns.get(item.index, -1) >= later:
            give_back(turns[item.index] - later)
    for turn in range(len(loads) - later, len(loads)):
        give_back(turn)
    draft.items = items
