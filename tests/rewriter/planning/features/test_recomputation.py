"""The share of checkpoints with which computing and the link end together, by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.rewriter.ir.plan import Limits, Plan, Prediction, Schedule, Workload
from forebay.rewriter.ir.schedule.batch_schedule import ALONE, BatchSchedule
from forebay.rewriter.ir.schedule.cache_placement import CachePlacement
from forebay.rewriter.ir.schedule.recomputation import Recomputation
from forebay.rewriter.planning.features.recomputation import balanced_share, shares_beside, try_checkpoints
from forebay.rewriter.planning.options import Options
from forebay.rewriter.predict.checkpoint_shares import SHARES


def plan(**busy: float) -> Plan:
    return Plan("", "", Limits(1), Workload(), Schedule(), (), prediction=Prediction(busy_time_s=busy))


def test_both_lanes_end_together() -> None:
    """K and V take the link 10 s and computing 2; checkpoints halve the one and add 11 s to the other: at a half both
    take 7.5 s."""
    plain, full = plan(**{"return": 10.0, "compute": 2.0}), plan(**{"return": 5.0, "compute": 13.0})
    share = balanced_share(plain, full)
    assert share == pytest.approx(0.5)
    assert 10 - 5 * share == pytest.approx(2 + 11 * share)


def test_the_disk_is_one_link_for_all_that_uses_it() -> None:
    plain, full = plan(disk=4.0, load=4.0, write=1.0, compute=3.0), plan(disk=4.0, load=2.0, write=0.5, compute=6.5)
    assert balanced_share(plain, full) == pytest.approx(1.0)


def test_none_where_computing_takes_longer_anyway() -> None:
    assert balanced_share(plan(load=1.0, compute=2.0), plan(load=0.5, compute=9.0)) == 0.0


@pytest.mark.parametrize(("share", "expected"), [
    (0.0, [(1, 4)]), (0.3, [(1, 4), (1, 3)]), (0.5, [(1, 2)]), (0.9, [(3, 4), (1, 1)]), (1.0, [(1, 1)])])
def test_the_shares_on_either_side(share: float, expected: list[tuple[int, int]]) -> None:
    assert shares_beside(share) == expected


@pytest.mark.parametrize("best", [(0, 1), *SHARES])
def test_the_best_share_is_found_though_the_balance_says_another(best: tuple[int, int]) -> None:
    """Computing and the link would end together at 0.53, and waits make another share the fastest."""
    staged = replace(ALONE, cache=CachePlacement("host", 8, 3))
    tried = list[float]()

    def simulated(batching: BatchSchedule) -> Plan:
        kept = batching.recomputation
        share = kept.checkpoints / kept.period if kept.period else 0.0
        tried.append(share)
        busy = {"return": 10 - 5 * share, "compute": 2 + 10 * share}
        return replace(plan(), schedule=Schedule(batching=batching), prediction=Prediction(
            busy_time_s=busy, decode_time_s=1 + abs(share - best[0] / best[1])))

    trial: Any = SimpleNamespace(simulate=simulated, options=Options(), graphs=SimpleNamespace(
        checkpoint_tokens=lambda tokens, kept: 2 * tokens))
    found = try_checkpoints(simulated(staged), trial).schedule.batching.recomputation
    assert (found.checkpoints, found.period or 1) == best
    assert len(tried) == len(set(tried))


def test_the_next_block_of_a_request_keeps_the_share() -> None:
    """HybridServe, section 4.3.2: of three checkpoints to one block of K and V, with five and two there, the next one
    is a checkpoint. So it is for each request, of any length."""
    for some, period in SHARES:
        share = Recomputation(some, period, 16)
        for stretches in range(1, 40):
            assert sum(map(share.keeps, range(stretches))) == stretches * some // period
    kinds = [Recomputation(3, 4, 16).keeps(n) for n in range(8)]
    assert sum(kinds[:7]) == 5 and kinds[7]
