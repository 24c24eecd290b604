"""How much of a staged cache to keep as checkpoints (HybridServe, Algorithm 1 and equation 8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from forebay.rewriter.ir.cache_layout import CACHE_STAGING
from forebay.rewriter.ir.plan import Plan, PlanError
from forebay.rewriter.ir.program import COMPUTE, DISK, DOWNLOAD, LOAD, UPWARD, WRITE
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.recomputation import Recomputation
from forebay.rewriter.planning.features.feature import ScheduleFeature, ScheduleRequest, Trial
from forebay.rewriter.planning.objective import latency_s
from forebay.rewriter.predict.checkpoint_shares import SHARES

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
    """Return whether a link takes longer than computing in a decode step."""
    busy = plan.prediction.busy_time_s
    return _link_s(busy) > busy.get(COMPUTE, 0.0)


def _link_s(busy_time_s: Mapping[str, float]) -> float:
    return max(sum(busy_time_s.get(stream, 0.0) for stream in streams) for streams in LINKS)


def shares_beside(share: float) -> list[tuple[int, int]]:
    """Return the entries of `SHARES` just below and above `share`, or the equal one; none below where none is as
    small."""
    below = [s for s in SHARES if s[0] / s[1] <= share][-1:]
    above = [s for s in SHARES if s[0] / s[1] >= share][:1]
    return list(dict.fromkeys([*below, *above]))


def with_checkpoints(
    batching: BatchSchedule, tokens_of: Callable[[int, str], int], share: tuple[int, int], kept: str
) -> BatchSchedule:
    """The schedule with checkpoints in the format `kept` of so many stretches of tokens of every so many, its `share`;
    a block holds as many as `tokens_of` says.

    Raises:
        PlanError: It can have none.
    """
    some, period = share
    if not 0 < some <= period:
        raise PlanError(f"checkpoints: {some} of {period} stretches of tokens are no share of them")
    if batching.cache.stays_on_host:
        raise PlanError("checkpoints: attention reads K and V in host memory where they lie; leave out one of both")
    if batching.sparsity.blocks < 1:
        raise PlanError("checkpoints: decode steps that choose blocks (kv_blocks) find K and V there; leave out one of "
                        "both")
    tokens = tokens_of(batching.cache.block_tokens, kept)
    if not tokens:
        raise PlanError(f"checkpoints: blocks of {batching.cache.block_tokens} tokens cannot hold them; wish for other "
                        "cache_tokens")
    return replace(batching, cache=replace(batching.cache, on_device=0),
                   recomputation=Recomputation(some, period, tokens, kept))


def try_checkpoints(best: Plan, trial: Trial) -> Plan:
    """Simulate the schedule of `best` with checkpoints, where a link binds it and they are smaller than K and V: of all
    tokens, the shares next to the one with which computing and that link end together, and those next to the best of
    these, as long as one is better. What passes through host slots keeps K and V: of blocks of two kinds the slot is
    not the table in order, so it would cross whole."""
    batching = best.schedule.batching
    hops = best.schedule.host_hop and any(b.arena == CACHE_STAGING for b in best.buffers)  # some lie on the disk
    if trial.options.checkpoints is not None or not (batching.cache.staged and link_binds(best)) or (
            batching.cache.stays_on_host or hops):
        return best
    try:
        full = with_checkpoints(batching, trial.graphs.checkpoint_tokens, (1, 1), trial.options.checkpoint_format)
    except PlanError:  # the model has no place for them
        return best
    if full.recomputation.block_tokens <= full.cache.block_tokens or (every := trial.simulate(full)) is None:
        return best
    found = {(1, 1): every}
    near = [share for share in shares_beside(balanced_share(best, every)) if share not in found]
    while near:
        for share in near:
            some, period = share
            plan = trial.simulate(replace(full, recomputation=replace(
                full.recomputation, checkpoints=some, period=period)))
            found[share] = plan or every
        least = min(found, key=lambda share: latency_s(found[share]))
        at = SHARES.index(least)
        near = [share for share in SHARES[max(0, at - 1):at + 2] if share not in found]
    return min([best, *found.values()], key=latency_s)


def asked_checkpoints(batching: BatchSchedule, request: ScheduleRequest) -> Iterator[BatchSchedule]:
    """The share of a staged cache that is asked for."""
    share, options = request.options.checkpoints or (0, 1), request.options
    yield batching if not (request.staged and share[0]) else with_checkpoints(
        batching, request.graphs.checkpoint_tokens, share, options.checkpoint_format)


RECOMPUTATION = ScheduleFeature("recomputation", candidates=asked_checkpoints, improve=try_checkpoints)
