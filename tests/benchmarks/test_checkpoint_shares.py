"""Shares of checkpoints on a machine whose link binds: one between is the best, and near where both lanes meet."""

from __future__ import annotations

import pytest

from benchmarks.checkpoint_shares import ALL, plans, rows, times, with_link
from forebay.rewriter.ir.plan import Workload
from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.planning.features.recomputation import balanced_share


@pytest.mark.all
def test_a_share_between_is_the_best() -> None:
    found = plans("opt-6.7b", 2, PRESETS["rtx4090"], Workload(128, 512, 128), 16)
    table = {share: row for share, row in zip(ALL, rows(found, 128), strict=True)}
    best = max(table, key=lambda share: table[share]["tokens_per_s"])
    assert 0 < best[0] < best[1]
    assert table[best]["times_kv_only"] > 1.1 and table[1, 1]["times_kv_only"] < table[best]["times_kv_only"] / 1.1
    links = [row["links_s"] for row in table.values()]
    assert links == sorted(links, reverse=True), "the more checkpoints, the less crosses the link"
    at = sorted(ALL, key=lambda share: share[0] / share[1])
    assert abs(at.index(best) - min(range(len(at)), key=lambda i: abs(
        at[i][0] / at[i][1] - balanced_share(found[0, 1], found[1, 1])))) <= 1, "within one step of the balance"


@pytest.mark.all
def test_the_faster_the_link_the_less_checkpoints_are_worth() -> None:
    work, gained = Workload(128, 512, 128), []
    for rate in (10e9, 25e9):
        machine = with_link(PRESETS["h100"], rate)
        table = rows(plans("opt-6.7b", 2, machine, work, 16, "act8"), 128)
        best, only = times(table)
        assert best == max(row["times_kv_only"] for row in table)
        assert only == pytest.approx(best / table[-1]["times_kv_only"])
        gained.append((table[0]["links_s"], best))
    assert gained[0][0] == pytest.approx(2.5 * gained[1][0], rel=0.05) and gained[0][1] > gained[1][1] > 2
