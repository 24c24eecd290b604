"""How much of a staged cache to keep as checkpoints (HybridServe, Algorithm 1 and equation 8)."""

from __future__ import annotations

from collections.abc import Mapping

from forebay.rewriter.ir.plan import Plan
from forebay.rewriter.ir.program import COMPUTE, DISK, DOWNLOAD, LOAD, UPWARD, WRITE
from forebay.rewriter.predict.activation_ratio import SHARES

LINKS = ((DISK, LOAD, WRITE), UPWARD, (DOWNLOAD,))  # streams that share a link


def balanced_share(plain: Plan, full: Plan) -> float:
    """The share of the cache, 0 to 1, whose checkpoints let computing and the link that binds a decode step end
    together: `plain` keeps K and V of all tokens and `full` checkpoints of all, and in between both grow in proportion.
    0 where computing takes longer anyway."""
    before, behind = plain.prediction.busy_time_s, full.prediction.busy_time_s
    spare = _link_s(before) - before.get(COMPUTE, 0.0)
    if spare <= 0:
        return 0.0
    moves = behind.get(COMPUTE, 0.0) - before.get(COMPUTE, 0.0) + _link_s(before) - _link_s(behind)
    return min(1.0, spare / moves) if moves > 0 else 1.0


def link_binds(plan: Plan) -> bool:
    """Whether a link takes longer than computing in a decode step."""
    busy = plan.prediction.busy_time_s
    return _link_s(busy) > busy.get(COMPUTE, 0.0)


def _link_s(busy_time_s: Mapping[str, float]) -> float:
    return max(sum(busy_time_s.get(stream, 0.0) for stream in streams) for streams in LINKS)


def shares_beside(share: float) -> list[tuple[int, int]]:
    """Of `SHARES` the one below `share` and the one above, or the one that it is; none below where none is as small."""
    below = [s for s in SHARES if s[0] / s[1] <= share][-1:]
    above = [s for s in SHARES if s[0] / s[1] >= share][:1]
    return list(dict.fromkeys([*below, *above]))
