"""Issue copies ahead of their use."""

from __future__ import annotations

from torch import fx

from forebay.rewriter import ops
from forebay.rewriter.graph import META, Transfer
from forebay.rewriter.plan import Plan, PlanError


def hoist_prefetch(gm: fx.GraphModule, plan: Plan) -> None:
    """Move every `fetch` up to the release that lets it start; the order of fetches stays, and none moves before the
    release of its slot's last contents.

    Fetch number j moves to just behind the release of number j - lead. The first `lead` fetches move to the top of the
    graph: lowering issues them at the end of the step before.
    """
    lead, slots = plan.schedule.lead, plan.schedule.slots
    fetches = [n for n in gm.graph.nodes if n.target is ops.fetch]
    releases = {n.args[0]: n for n in gm.graph.nodes if n.target is ops.release}
    position = {n: i for i, n in enumerate(gm.graph.nodes)}
    top = next((n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr")), None)
    anchor: fx.Node | None = None  # what the previous hoisted fetch stands behind, to keep the order
    anchor_at = -1
    for j, node in enumerate(fetches):
        mark = node.meta[META]
        assert isinstance(mark, Transfer)
        if j < lead:
            if anchor is None and top is not None and top is not node:
                top.prepend(node)
            elif anchor is not None:
                anchor.append(node)
            anchor = node
            continue
        freed = releases[fetches[j - slots]] if j >= slots else None
        behind = releases[fetches[j - lead]]
        if freed is not None and position[freed] > position[behind]:
            behind = freed
        if freed is not None and position[freed] > position[node]:
            raise PlanError(
                f"plan.schedule.slots: {slots} slots cannot hold what one operator needs at once: {mark.weight} is "
                f"needed before {freed.args[0]} leaves its slot; use more slots")
        if position[behind] > position[node]:  # released out of order: no earlier place is safe
            behind = node
        if position[behind] > anchor_at:
            anchor, anchor_at = behind, position[behind]
        if anchor is not None and anchor is not node:
            anchor.append(node)
        anchor = node
