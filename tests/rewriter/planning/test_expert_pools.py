"""Pools of experts in plans: their layout is sound, more memory never costs, and what they read is as it is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Prediction, Workload
from forebay.rewriter.ir.program import DISK, UPLOAD
from forebay.rewriter.ir.schedule.micro_batches import MicroBatches
from forebay.rewriter.ir.schedule.routed_fetch import AHEAD, LANDING, POOL, RESULTS, ROUTING, RoutedFetch, named_experts
from forebay.rewriter.planning.advice import advise
from forebay.rewriter.planning.expert_pools import pool_buffers
from forebay.rewriter.planning.model_needs import ModelNeeds, PhaseNeed, WeightUse
from forebay.rewriter.planning.options import Options
from forebay.rewriter.planning.planner import make_plan, refuse_forced, smallest_budget
from forebay.rewriter.planning.step_streams import ChunkRoom, StepStreams, kinds_of
from forebay.rewriter.predict.closed_form import Rates
from tests.rewriter.planning.test_planner import assert_sound, rates

MACHINE = "m"
GPU_RATES = Rates(1e8, 1e-3, upload_bytes_per_s=1e9, upload_latency_s=1e-5, hop=True)


@st.composite
def mixtures(draw: st.DrawFn) -> ModelNeeds:
    """Layers of a dense weight and a table of experts; sizes need no alignment."""
    experts, layers = draw(st.sampled_from([4, 8, 32])), draw(st.integers(1, 4))
    picks, entry = draw(st.integers(1, 3)), 64 * draw(st.integers(20, 400))
    uses = []
    for i in range(layers):
        uses.append(WeightUse(f"d{i}", 64 * 200 * draw(st.integers(1, 9)), 200, True, False, True, layers=(i,)))
        uses.append(WeightUse(f"e{i}", experts * entry, experts, True, False, True, layers=(i,), share=picks / experts,
                              outputs=draw(st.integers(1, 99))))
    return ModelNeeds("f", uses, {}, {"cache": 640}, lambda tokens: PhaseNeed(64 * tokens, 10 * tokens),
                      rates=draw(rates))


workloads = st.builds(Workload, st.integers(1, 3), st.integers(1, 20), st.integers(1, 30))


def time_s(plan: Plan) -> float:
    return plan.prediction.prefill_time_s + plan.prediction.decode_time_s * (plan.workload.new_tokens - 1)


@settings(deadline=None, max_examples=examples(100))
@given(mixtures(), workloads, st.integers(0, 600_000), st.integers(0, 600_000))
def test_more_memory_never_predicts_slower(needs: ModelNeeds, workload: Workload, extra: int, more: int) -> None:
    smallest, _ = smallest_budget(needs, workload, Options())
    plans = []
    for nbytes in (smallest + extra, smallest + extra + more):
        plan = make_plan(needs, Budget(nbytes), workload, Options(), MACHINE)
        assert_sound(plan, needs, Budget(nbytes))
        pools = {w.name: w.pool_slots for w in plan.weights if w.pool_slots}
        assert set(pools) in (set(), {u.name for u in needs.uses if u.share < 1}) and len({*pools.values()}) <= 1
        assert {b.name for b in plan.buffers if b.kind in ("pool", "routing")} == {
            name + end for name in pools for end in (POOL, ROUTING)} | ({RESULTS} if pools else set()) | (
                {AHEAD} if plan.schedule.routed.ahead else set())
        whole = make_plan(needs, Budget(nbytes), workload, Options(expert_slots=0), MACHINE)
        assert time_s(plan) <= time_s(whole) * (1 + 1e-9) and not any(w.pool_slots for w in whole.weights)
        plans.append(plan)
    assert time_s(plans[1]) <= time_s(plans[0]) * (1 + 1e-9)


def mixture(**changed: object) -> ModelNeeds:
    """One layer: 8 experts of 64 KiB, of which a token picks 2, behind 64 KiB that all tokens read."""
    uses = [WeightUse("d", 1 << 16, 64, True, False, True, layers=(0,)),
            WeightUse("e", 1 << 19, 8, True, False, True, layers=(0,), share=0.25, outputs=10)]
    return replace(ModelNeeds("f", uses, {}, {}, lambda tokens: PhaseNeed(64, 64)), **changed)


@pytest.mark.parametrize("rates", [Rates(), GPU_RATES], ids=["cpu", "gpu"])
def test_slots_hold_an_expert_of_a_table_of_few(rates: Rates) -> None:
    """Experts of 320 MiB, as Mixtral's: a slot of a sixteenth of the table would hold half of one."""
    table = WeightUse("e", 8 * 320 << 20, 8, True, False, True, layers=(0,), share=0.25, outputs=10)
    needs = ModelNeeds("f", [table], {}, {}, lambda tokens: PhaseNeed(64, 64), rates=rates, host_hop=rates.hop)
    options = Options(expert_slots=0, cpu_experts=1 if rates.hop else None)
    work = Workload(1, 16, 100)
    smallest, _ = smallest_budget(needs, work, options)
    assert smallest > 320 << 20
    plan = make_plan(needs, Budget(smallest, 4 << 30), work, options, MACHINE)
    assert plan.weight("e").tier != "device" and plan.weight("e").tile_rows >= 1
    assert plan.schedule.slot_nbytes >= 320 << 20


@pytest.mark.parametrize(("asked", "named"), [
    ({"expert_slots": 8, "weight_shares": (0.9, 0.05)}, r"weight_shares=\(0.9, 0.05\), expert_slots=8: no budget"),
    ({"expert_slots": 8, "policy": (50, 0, 100, 0, 100, 0)}, r"policy=\(50, .*\), expert_slots=8: no budget")])
def test_options_that_no_budget_is_enough_for_are_named(asked: dict[str, object], named: str) -> None:
    options = Options(**asked)  # type: ignore[arg-type]
    for nbytes in (1 << 16, 1 << 30):
        with pytest.raises(PlanError, match=named):
            make_plan(mixture(), Budget(nbytes, 1 << 30), Workload(3, 16, 100), options, MACHINE)


def test_predicted_bytes_and_hits_are_those_of_a_router_that_prefers_nobody() -> None:
    needs, work = mixture(), Workload(3, 16, 100)
    options = Options(expert_slots=4, experts_ahead=0)
    smallest, _ = smallest_budget(needs, work, options)
    plan = make_plan(needs, Budget(smallest + (1 << 17)), work, options, MACHINE)
    assert plan.schedule.routed == RoutedFetch((1,), 0.5) and plan.weight("e").pool_slots == 4
    assert named_experts(8, 2, 3) == 8 * (1 - 0.75**3)
    assert plan.weight("d").tier == "device"
    assert plan.prediction.streamed_nbytes == round(named_experts(8, 2, 3) * 0.5 * (1 << 16))


def test_experts_are_read_ahead_where_most_are_named() -> None:
    """Where that is predicted to be faster than larger pools; one sequence names too few."""
    rates = Rates(1e8, 1e-4, compute_s=lambda tokens: 0.1)
    uses = [replace(use, name=f"{use.name}{i}", layers=(i,)) for i in range(8) for use in mixture().uses]
    needs, ahead = replace(mixture(), uses=uses, rates=rates), []
    for batch in (1, 8):
        none, work = Options(expert_slots=3, experts_ahead=0), Workload(batch, 16, 100)
        smallest, _ = smallest_budget(needs, work, none)
        budget = Budget(smallest + (1 << 20))
        before, plan = (make_plan(needs, budget, work, options, MACHINE) for options in (none, Options(expert_slots=3)))
        assert not before.schedule.routed.ahead and time_s(plan) <= time_s(before)
        assert plan.weight("d0").tier == plan.weight("d7").tier == "device"
        assert_sound(plan, needs, budget)
        ahead.append(plan.schedule.routed.ahead)
        read = named_experts(8, 2, batch) * (1 - 3 / 8 - ahead[-1] / 8) + ahead[-1]
        assert plan.prediction.streamed_nbytes == pytest.approx(8 * read * (1 << 16))
        assert [b.nbytes for b in plan.buffers if b.name == AHEAD] == [n * ((1 << 16) + 4096) for n in ahead[-1:] if n]
    assert ahead == [0, 2]


@pytest.mark.parametrize(("ahead", "hop", "tiers"), [(-1, False, ["disk"]), (1, True, ["host"]), (1, False, [])])
def test_wrong_numbers_of_experts_ahead_are_refused(ahead: int, hop: bool, tiers: list[str]) -> None:
    routed = RoutedFetch((1,) if tiers else (), 0.0, ahead=ahead)
    assert routed.fault((1,), tiers, [], hop, MicroBatches()).startswith(f"schedule.routed.ahead: {ahead} must be")


def test_a_step_in_rounds_has_room_for_what_each_is_told() -> None:
    _, table = mixture().uses
    room = (1 << 16) + 4096  # an expert may begin anywhere in a page
    assert [nbytes for *_, nbytes in pool_buffers([(table, 4)], 1)] == [4 * room, 8 * (8 + 4 * (4 + 8)), 2 * 40]
    assert [nbytes for *_, nbytes in pool_buffers([(table, 3)], 4)] == [3 * room, 8 * (8 + 10 * (3 + 8)), 8 * 40]


def test_pools_of_a_number_that_was_asked_for() -> None:
    needs, work = mixture(), Workload(1, 4, 4)
    least, _ = smallest_budget(needs, work, Options(expert_slots=6))
    assert make_plan(needs, Budget(least), work, Options(expert_slots=6), MACHINE).weight("e").pool_slots == 6
    with pytest.raises(PlanError, match="expert_slots=6 cannot work within"):
        make_plan(needs, Budget(least - 1), work, Options(expert_slots=6), MACHINE)
    plan = make_plan(mixture(weight_tier="host"), Budget(least, 1 << 22), work, Options(), MACHINE)
    assert plan.weight("e").pool_slots == 0 and not plan.schedule.routed.steps  # there tables stream whole


@pytest.mark.parametrize(("host", "tier", "whole"), [
    (1 << 21, "host", 0), (1200 << 10, "host", 1), (400 << 10, "disk", 1)])
def test_on_a_gpu_pools_are_filled_from_host_memory_while_it_lasts(host: int, tier: str, whole: int) -> None:
    """Of three tables of 512 KiB all lie there; two, as the device has room for the third; none, so experts land."""
    uses = [u for i in range(3) for u in (WeightUse(f"d{i}", 1 << 14, 64, True, False, True, layers=(i,)), WeightUse(
        f"e{i}", 1 << 19, 8, True, False, True, layers=(i,), share=0.25))]
    needs, work = mixture(uses=uses, host_hop=True, rates=GPU_RATES), Workload(1, 4, 40)
    budget = Budget(900 << 10, host)
    plan = make_plan(needs, budget, work, Options(slots=1, slot_nbytes=1 << 16), MACHINE)
    assert_sound(plan, needs, budget)
    tables = [w for w in plan.weights if w.name.startswith("e")]
    assert sum(w.tier == "device" for w in tables) == whole
    assert {w.tier for w in tables if w.pool_slots} == {tier} and sum(w.pool_slots > 0 for w in tables) == 3 - whole
    landing = [b.nbytes for b in plan.buffers if b.name == LANDING]
    slots = max(w.pool_slots for w in tables)
    assert landing == ([slots << 16] if tier == "disk" else [])
    missed, at_rest = (3 - whole) * 2 * (1 - slots / 8) * (1 << 16), plan.prediction
    assert at_rest.streamed_nbytes == round(missed)
    assert at_rest.busy_time_s[UPLOAD] == pytest.approx(missed / 1e9)
    assert at_rest.busy_time_s.get(DISK, 0.0) == pytest.approx(missed / 1e8 if tier == "disk" else 0.0)
    assert at_rest.decode_time_s == pytest.approx(sum(at_rest.busy_time_s.values()) + (3 - whole) * (
        1e-5 + (1e-3 if tier == "disk" else 0.0)))


def test_advice_counts_what_larger_pools_would_read() -> None:
    needs, work = mixture(), Workload(1, 16, 100)
    plan = make_plan(needs, Budget(smallest_budget(needs, work, Options(expert_slots=2))[0]), work,
                     Options(expert_slots=2), MACHINE)
    plan = replace(plan, prediction=Prediction(1.0, 1.0, {"compute": 0.2, "lookup": 0.8}, 1000))
    first, *rest = advise(plan)
    assert first == "disk-bound: reads of experts take 80 % of the step, computation 20 %"
    # a quarter is there; with twice the slots a half, so that two thirds are left of what is read
    assert [line.rpartition(" would give ")[2] for line in rest] == ["5.0x", "1.7x", "1.4x"]
    assert "in which all experts stay" in rest[0] and "twice as many experts" in rest[2]


def test_advice_names_a_budget_once() -> None:
    """Where twice the slots are slots for all."""
    needs, work = mixture(), Workload(1, 16, 100)
    plan = make_plan(needs, Budget(smallest_budget(needs, work, Options(expert_slots=4))[0]), work,
                     Options(expert_slots=4), MACHINE)
    _, *rest = advise(replace(plan, prediction=Prediction(1.0, 1.0, {"compute": 0.2, "lookup": 0.8}, 1000)))
    assert len(rest) == 2 and "in which all experts stay" in rest[0] and "a disk twice as fast" in rest[1]


def test_slots_for_experts_that_a_model_does_not_have_are_refused() -> None:
    dense = replace(mixture(), uses=mixture().uses[:1])
    least, _ = smallest_budget(dense, Workload(3, 16, 100), Options())
    with pytest.raises(PlanError, match="expert_slots=4: the model has no experts"):
        refuse_forced(dense, Budget(least), Workload(3, 16, 100), Options(expert_slots=4))


def test_slices_of_a_table_count_where_steps_read_it_whole() -> None:
    """Beyond one for each copy, as parts of a copy; steps that read experts by name issue no such copies."""
    dense, table = mixture().uses
    work, found = Workload(1, 4, 4), {}
    for slices in (1, 16):
        needs = mixture(uses=[dense, replace(table, slices=slices)], rates=Rates(slice_share=0.25))
        kinds = kinds_of(needs, work)
        fit = ChunkRoom(4, 0, 3, 1 << 18)  # four experts a copy
        streams = StepStreams(needs.rates, kinds, 1, kinds.products_nbytes, 0, fit)
        found[slices] = streams.moved(4)[1], streams.moved(1)[1]
        named = replace(streams, nbytes=dense.nbytes, fit=replace(fit, pool_slots=3))
        assert named.moved(1)[1] == pytest.approx(dense.nbytes / kinds.products_nbytes * kinds.tiles(1 << 18))
        assert streams.step_time_s(4) > 0
    assert found[1] == (3.0, 3.0) and found[16] == pytest.approx((3 + 0.25 * 14, 3 + 0.25 * 14))
