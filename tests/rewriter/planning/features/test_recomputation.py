"""The share of checkpoints with which computing and the link end together, by hand."""

from __future__ import annotations

import pytest

from forebay.rewriter.ir.plan import Limits, Plan, Prediction, Schedule, Workload
from forebay.rewriter.planning.features.recomputation import balanced_share, shares_beside


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
