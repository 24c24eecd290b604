"""The search: budgets, objectives, the frontier, and what it says when nothing fits."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from forebay.rewriter.machine.presets import PRESETS
from forebay.rewriter.planning.objective import BudgetError, Objective
from forebay.rewriter.policy.block_costs import BlockShape
from forebay.rewriter.policy.placement import NO_CHECKPOINTS
from forebay.rewriter.policy.plan_search import BATCHES, blocks
from forebay.rewriter.policy.policy_search import Problem, Space, candidates, frontier, search
from forebay.rewriter.policy.policy_summary import advice, bottleneck, summary, weight_tiers
from forebay.rewriter.policy.shares import TIERS
from forebay.rewriter.predict.model_shapes import PRESET_MODELS, decoder_shape

SMALL = decoder_shape("small", layers=24, hidden=1024, intermediate=4096, heads=16, kv_heads=16, vocab=32000,
                      gated=False)
SPACE = Space(micro_batches=(1, 4, 16), blocks=(1, 4))


def problem(**capacity: int) -> Problem:
    return Problem(SMALL, PRESETS["t4"], 256, 32, capacity=capacity)


@pytest.mark.parametrize("model", ["opt-125m", "opt-175b", "llama-3-70b", "qwen3-8b"])
@pytest.mark.parametrize("machine", ["t4", "h200"])
def test_any_preset_model_on_any_preset_machine(model: str, machine: str) -> None:
    policy = search(Problem(PRESET_MODELS[model], PRESETS[machine], 512, 32), SPACE)
    weights = weight_tiers(policy).values()
    assert sum(w["nbytes"] for w in weights) == pytest.approx(PRESET_MODELS[model].weight_nbytes, rel=1e-6)
    for tier in TIERS:
        held = sum(w["nbytes"] for w in weights if w["tier"] == tier)
        assert held <= summary(policy)["peak_nbytes"][tier] <= policy.costs.capacity[tier]
    assert policy.bound_time_s <= policy.placement.time_s * (1 + 1e-4)


def test_any_number_of_sequences_may_be_asked_for() -> None:
    assert [block.size for block in blocks(0)] == sorted(BATCHES)
    for asked in (1, 3, 1024, 1536, 100_000):
        assert blocks(asked) == [BlockShape(asked, order="row")]


def test_more_budget_is_never_slower() -> None:
    rates = [search(problem(device=n * 10**8, host=10**9), SPACE).tokens_per_s for n in (2, 4, 6, 9, 14)]
    for less, more in pairwise(rates):
        assert more >= less * (1 - 1e-3)  # the exact pass may stop 0.1 % from its optimum
    assert rates[-1] > 1.5 * rates[0]


def test_latency_and_throughput_pull_apart() -> None:
    quick = search(problem(device=6 * 10**8), SPACE, Objective("latency"))
    wide = search(problem(device=6 * 10**8), SPACE)
    assert quick.block.size == 1 < wide.block.size
    assert quick.placement.time_s < wide.placement.time_s
    assert quick.tokens_per_s < wide.tokens_per_s


def test_throughput_under_a_latency_bound() -> None:
    free = search(problem(device=6 * 10**8), SPACE)
    bounded = search(problem(device=6 * 10**8), SPACE, Objective(latency_s=free.placement.time_s * 0.6))
    assert bounded.placement.time_s <= free.placement.time_s * 0.6
    assert bounded.tokens_per_s < free.tokens_per_s
    with pytest.raises(BudgetError, match="the quickest takes"):
        search(problem(device=6 * 10**8), SPACE, Objective(latency_s=1e-3))


def test_smallest_budget_reaches_its_target_and_less_does_not() -> None:
    target = 0.7 * search(problem(), SPACE).tokens_per_s
    policy = search(problem(), SPACE, Objective("budget", tokens_per_s=target))
    needed = policy.costs.nbytes(policy.placement.x)["device"]
    assert policy.tokens_per_s >= target * (1 - 1e-4)
    assert search(problem(device=int(needed * 1.002) + 1), SPACE).tokens_per_s >= target * (1 - 2e-3)
    assert search(problem(device=int(needed * 0.97)), SPACE).tokens_per_s < target
    with pytest.raises(BudgetError, match="no device budget reaches"):
        search(problem(), SPACE, Objective("budget", tokens_per_s=1e9))


def test_nothing_fits_names_the_tier_and_the_least_that_would() -> None:
    with pytest.raises(BudgetError, match="binding tier is device") as refused:
        search(problem(device=10**6), SPACE)
    least = int(re.search(r"\((\d+) bytes\)", str(refused.value)).group(1))  # type: ignore[union-attr]
    assert search(problem(device=int(least * 1.02)), SPACE).tokens_per_s > 0
    with pytest.raises(BudgetError):
        search(problem(device=int(least * 0.98)), SPACE)
    with pytest.raises(BudgetError, match=r"device: .* needed; or host: .* needed"):
        search(problem(device=3 * 10**8, host=0, disk=0), SPACE)


def test_frontier_falls_from_quick_to_wide() -> None:
    points = frontier(problem(device=4 * 10**8), Space(micro_batches=(1, 2, 4, 8, 16), blocks=(1, 2, 4)))
    assert len(points) >= 3
    for a, b in pairwise(points):
        assert b.placement.time_s >= a.placement.time_s * (1 - 1e-3)
        assert b.tokens_per_s > a.tokens_per_s


def test_grouped_queries_keep_no_checkpoints() -> None:
    """A checkpoint of Llama-3-70B is four times its K and V. Those that cross the link alone are worth checkpoints."""
    policy = search(Problem(PRESET_MODELS["llama-3-70b"], PRESETS["rtx4090"], 512, 32), SPACE)
    shares = summary(policy)["shares"]
    assert sum(shares["checkpoint"].values()) == 0
    multi = search(Problem(PRESET_MODELS["opt-66b"], PRESETS["rtx4090"], 512, 32),
                   Space(micro_batches=(16,), blocks=(8,), host_attention=False))
    assert sum(summary(multi)["shares"]["checkpoint"].values()) > 0.1


def test_candidates_hold_no_duplicate_work() -> None:
    found = list(candidates(Space(orders=("row", "zigzag", "diagonal")), host_attends=True))
    assert len(set(found)) == len(found)
    assert {b.order for b in found if b.micro_batches == 1} == {"row"}
    assert {b.order for b in found if b.micro_batches > 1} == {"diagonal"}
    assert all(b.size <= 1024 for b in found)


def test_a_fixed_batch_is_kept() -> None:
    assert search(problem(), Space(batch=6)).block.size == 6


def test_what_binds_and_what_would_move_it_is_said() -> None:
    policy = search(problem(device=3 * 10**8), Space(micro_batches=(1,), blocks=(1,), closed=NO_CHECKPOINTS))
    assert bottleneck(policy) == "host_to_device"
    assert re.search(r"bound by the link from host to device; w4g64 weights would give \d+\.\dx", advice(policy))
    assert policy.block == BlockShape(1, 1, "row", host_attention=policy.block.host_attention)
