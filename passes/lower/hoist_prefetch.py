"""Issue copies ahead of their use."""

from __future__ import annotations

from forebay.passes.lower.draft import Draft, Fetch, Free
from forebay.rewriter.ir.plan import Plan, PlanError


def hoist_prefetch(draft: Draft, plan: Plan) -> None:
    """Move every Fetch up to the Free that lets it start: number j stands behind Free number j - lead, in order, and
    never before its slot's last contents are free.

    The first `lead` of them become the prologue, and stand again at the end of the step, for the next one. PlanError
    where one launch needs more moves at once than there are slots.
    """
    lead, slots, count = plan.schedule.lead, plan.schedule.slots, len(draft.moves)
    ahead = min(lead, count)
    draft.prologue = tuple(range(ahead))
    last_in_slot = {j % slots: j for j in range(count)}
    freed: set[int] = set()
    items: list = []
    following, again = ahead, 0  # the next move to issue: of this step, of the next one
    for item in draft.items:
        if isinstance(item, Fetch):
            if item.index < following:
                continue  # issued already
            if item.index >= slots and item.index - slots not in freed:
                raise PlanError(f"plan.schedule.slots: {slots} slots cannot hold what one operator needs at once: "
                                f"{draft.moves[item.index].label} is needed before "
                                f"{draft.moves[item.index - slots].label} leaves its slot; use more slots")
            following = item.index + 1
        items.append(item)
        if not isinstance(item, Free):
            continue
        freed.add(item.index)
        while following < count and following - lead in freed and (
                following < slots or following - slots in freed):
            items.append(Fetch(following))
            following += 1
        while following == count and again < ahead and last_in_slot[again % slots] in freed:
            items.append(Fetch(again))
            again += 1
    draft.items = items
