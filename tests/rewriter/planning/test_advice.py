"""What binds a plan's step is named, and what would move it is costed from the plan itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.rewriter.ir.plan import Budget, GemmChoice, Plan, Prediction, Schedule, WeightPlacement, Workload
from forebay.rewriter.ir.schedule.sparsity import Sparsity
from forebay.rewriter.planning.advice import advise


def plan(compute: float, disk: float, dtype: str = "bfloat16", resident: int = 0) -> Plan:
    weights = (WeightPlacement("a", "disk", 1000), WeightPlacement("b", "device", resident))
    return Plan("f", "m", Budget(2000), Workload(), Schedule(), weights, gemm=(GemmChoice(dtype, 1, 8, 8, "flat"),),
                prediction=Prediction(1.0, max(compute, disk), {"compute": compute, "disk": disk}, 1000))


def test_a_disk_bound_step_gains_in_proportion_to_bytes_until_computation_binds() -> None:
    first, *rest = advise(plan(0.1, 1.0))
    assert first == "disk-bound: copies are busy 100 % of the step, computation 10 %"
    assert rest == ["a device budget of 2.9 KiB, which holds all weights and the KV cache, would give 10.0x",
                    "w4g64 weights (forebay quantize) would give 3.6x", "twice the sequences at once would give 2.0x",
                    "a disk twice as fast would give 2.0x"]


@pytest.mark.parametrize(("dtype", "resident", "gain"), [("float32", 0, "7.1x"), ("bfloat16", 200, "7.3x")])
def test_4_bit_weights_gain_what_they_save_beside_what_stays(dtype: str, resident: int, gain: str) -> None:
    assert f"w4g64 weights (forebay quantize) would give {gain}" in advise(plan(0.01, 1.0, dtype, resident))


def test_drafts_in_4_bits_gain_where_their_rows_have_room() -> None:
    """1000 bytes stream for 1 s, 3000 stay: 391 of these make room for rows of all 1391 that then stream."""
    (drafts,) = [line for line in advise(plan(0.01, 1.0, resident=3000)) if "drafts" in line]
    # a pass takes 1.391 s and 15 drafted tokens 0.15, of which 1 - 0.25 * 1391 / 4000 = 91 % are right: 8.8 tokens
    assert drafts == "drafts in 4 bits (--draft w4), 91 % of them accepted, would give 5.7x"
    for other in (plan(0.01, 1.0, resident=300), plan(0.9, 1.0, resident=3000),
                  replace(plan(0.01, 1.0, resident=3000), workload=Workload(batch=8))):
        assert not any("drafts" in line for line in advise(other))


def test_what_gains_nothing_is_not_said() -> None:
    assert advise(plan(1.0, 0.5)) == ["compute-bound: copies are busy 50 % of the step, computation 100 %"]
    packed = plan(0.1, 1.0)
    packed = replace(packed, weights=tuple(replace(w, format="w4g64") for w in packed.weights))
    assert not any("w4g64" in line for line in advise(packed))


def test_a_plan_that_streams_nothing_or_predicts_nothing() -> None:
    still = replace(plan(1.0, 0.0), prediction=Prediction(1.0, 1.0, {"compute": 1.0}, 0))
    assert len(advise(still)) == 1 and "nothing streams" in advise(still)[0]
    assert advise(replace(still, prediction=Prediction())) == []


def test_caches_that_move_are_counted_beside_the_weights() -> None:
    """Together they take the step at most: side by side on one disk each is slowed by the other."""
    staged = replace(plan(0.2, 1.0), prediction=Prediction(1.0, 1.0, {"compute": 0.2, "disk": 0.5, "load": 1.0}, 1000))
    first, *rest = advise(staged)
    assert first == "disk-bound: copies are busy 100 % of the step, computation 20 %"
    # a third of the traffic is weights, two thirds are caches, which a kv4 cache brings down to 0.3125 of them
    assert "a kv4 cache would give 1.8x" in rest and "w4g64 weights (forebay quantize) would give 1.3x" in rest
    assert "twice the sequences at once would give 1.2x" in rest
    chosen = replace(staged.schedule, batching=replace(staged.schedule.batching, sparsity=Sparsity(0.1)))
    for other in (advise(staged, packs=False), advise(replace(staged, schedule=chosen))):
        assert other == [line for line in (first, *rest) if "kv4" not in line]


def test_a_host_that_attends_may_bind() -> None:
    attended = replace(plan(0.2, 0.1), prediction=Prediction(1.0, 1.0, {"compute": 0.2, "attend": 0.9}, 0))
    first, *rest = advise(attended)
    assert first == "host-bound: attention on the host is busy 90 % of the step, computation 20 %"
    assert not any("twice as fast" in line for line in rest)
    assert any("which holds all weights and the KV cache" in line for line in rest)


def test_ranks_that_exchange_for_longer_than_they_compute_are_told_so() -> None:
    shared = replace(plan(0.1, 0.0), prediction=Prediction(1.0, 1.0, {"compute": 0.1, "collect": 0.9}, 0))
    first, faster, others = advise(shared)
    assert first == "exchange-bound: exchanges with other ranks take 90 % of the step"
    assert faster == "exchanges twice as fast would give 1.8x" and "stages" in others
    streams = replace(shared, prediction=Prediction(1.0, 1.0, {"compute": 0.1, "collect": 0.4, "disk": 1.0}, 1000))
    assert advise(streams)[0].startswith("disk-bound")
