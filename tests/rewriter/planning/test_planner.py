"""Whatever the model, the planner's layout fits, options are honoured, and the smallest budget is the smallest."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.ir.meeting import meeting_of
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Workload, plan_from_dict, validate
from forebay.rewriter.planning import planner
from forebay.rewriter.planning.arena_layout import lay_out
from forebay.rewriter.planning.model_needs import ModelNeeds, PhaseNeed, WeightUse
from forebay.rewriter.planning.options import Options
from forebay.rewriter.planning.planner import make_plan, smallest_budget
from forebay.rewriter.predict.closed_form import Rates
from forebay.rewriter.predict.estimator import side_by_side_s
from forebay.runtime.devices.kinds import kind_of

MACHINE = "m"


@st.composite
def weight_uses(draw: st.DrawFn) -> list[WeightUse]:
    found = []
    for i in range(draw(st.integers(1, 7))):
        rows = draw(st.integers(1, 400))
        kind = draw(st.sampled_from(["matrix", "matrix", "whole", "table", "tied"]))
        nbytes = rows * draw(st.sampled_from([4, 96, 512, 6000]))
        tileable, lookup = kind in ("matrix", "tied"), kind in ("table", "tied")
        found.append(WeightUse(f"w{i}", nbytes, rows, tileable, lookup, kind != "table"))
    return found


@st.composite
def needs(draw: st.DrawFn) -> ModelNeeds:
    base, per_token, workspace = (draw(st.integers(0, 5000)) for _ in range(3))
    sizes = st.dictionaries(st.sampled_from("abc"), st.integers(1, 9000), max_size=3)
    constants = {f"constant_{k}": v for k, v in draw(sizes).items()}
    cache = {f"cache_{k}": v for k, v in draw(sizes).items()}
    prompt = {k: v * draw(st.integers(1, 10)) // 10 for k, v in cache.items()} if draw(st.booleans()) else {}
    return ModelNeeds("f", draw(weight_uses()), constants, cache,
                 lambda tokens: PhaseNeed(base + per_token * tokens, workspace * tokens), host_hop=draw(st.booleans()),
                 cache_prompt=prompt)


workloads = st.builds(Workload, st.just(2), st.integers(1, 40), st.integers(1, 9))


def streamed(plan: Plan) -> int:
    return sum(w.nbytes for w in plan.weights if w.tier != "device" and not w.gather)


def passes(plan: Plan) -> int:
    return -(-plan.workload.prompt // plan.schedule.prefill_chunk) + plan.workload.new_tokens - 1


def assert_sound(plan: Plan, needs: ModelNeeds, budget: Budget) -> None:
    """The layout overlaps nowhere, stays in its arenas, leaves room for activations, and all of it is in budget."""
    chunk = plan.schedule.prefill_chunk
    need = [needs.need(1), needs.need(chunk)]
    for phase, tokens in (("decode", 1), ("prefill", chunk)):
        ends = dict.fromkeys(plan.arenas, 0)
        for b in sorted(plan.buffers_of(phase), key=lambda b: (b.arena, b.offset)):
            assert b.offset >= ends[b.arena], f"{b} begins inside the buffer before it"
            ends[b.arena] = b.offset + b.nbytes
        for arena, nbytes in plan.arenas.items():
            assert ends[arena] <= nbytes
        assert plan.arenas["device"] - ends["device"] >= needs.need(tokens).activations
        sizes = needs.cache_prompt if plan.prefill_overlays_kv_cache and phase == "prefill" else needs.cache
        assert {b.name: b.nbytes for b in plan.buffers_of(phase) if b.kind == "cache"} == dict(sizes)
    assert not plan.prefill_overlays_kv_cache or chunk > 1, "one token at a time is decoding"
    assert plan.arenas["device"] + max(n.workspace for n in need) <= budget.device
    placed = {b.name: b for b in plan.buffers_of("decode")}
    assert {u.name for u in needs.uses} == {w.name for w in plan.weights}
    assert set(needs.constants) | set(needs.cache) <= set(placed)
    for w, u in zip(plan.weights, needs.uses, strict=True):
        assert w.nbytes == u.nbytes
        if w.tier == "disk":
            assert w.name not in placed
            if u.product:
                tile = (w.tile_rows or u.rows) * (u.nbytes // u.rows)
                assert tile <= plan.schedule.slot_nbytes, f"a tile of {w.name} does not fit its slot"
                assert u.tileable or not w.tile_rows
            assert w.gather == u.lookup
        else:
            assert (placed[w.name].arena, placed[w.name].nbytes) == (w.tier, w.nbytes)
    slots = [b for b in plan.buffers if b.kind == "slot" and b.arena == "device"]
    if any(w.tier != "device" and u.product for w, u in zip(plan.weights, needs.uses, strict=True)):
        assert len(slots) == plan.schedule.slots
        assert all(b.offset % PAGE_NBYTES == 0 for b in slots)
        assert all(0 <= b.nbytes - plan.schedule.slot_nbytes - PAGE_NBYTES + 1 < PAGE_NBYTES for b in slots)
    assert bool(slots) <= plan.schedule.lead <= plan.schedule.slots == len(slots)
    assert 1 <= chunk <= plan.workload.prompt
    validate(plan)
    assert plan_from_dict(json.loads(plan.to_json())) == plan


@settings(deadline=None, max_examples=examples(150))
@given(needs(), workloads, st.integers(0, 2_000_000), st.sampled_from([0, 0, 5000, 10**7]))
def test_layout_is_sound_and_in_budget(needs: ModelNeeds, workload: Workload, extra: int, host: int) -> None:
    smallest, _ = smallest_budget(needs, workload, Options())
    budget = Budget(smallest + extra, host)
    try:
        plan = make_plan(needs, budget, workload, Options(), MACHINE)
    except PlanError as error:
        assert host == 5000 and needs.host_hop and "budget.host: 4.9 KiB cannot hold the slots" in str(error)
        return
    assert_sound(plan, needs, budget)
    assert (plan.budget, plan.workload, plan.fingerprint, plan.machine) == (budget.limits, workload, "f", MACHINE)
    assert host == 0 or plan.arenas.get("host", 0) <= host
    if host == 10**7:
        assert not any(w.tier == "disk" and not w.gather and u.product
                       for w, u in zip(plan.weights, needs.uses, strict=True)), "room for all, and some stayed on disk"


@settings(deadline=None, max_examples=examples(150))
@given(needs(), workloads)
def test_smallest_budget_is_exact_and_named(needs: ModelNeeds, workload: Workload) -> None:
    smallest, parts = smallest_budget(needs, workload, Options())
    assert_sound(make_plan(needs, Budget(smallest), workload, Options(), MACHINE), needs, Budget(smallest))
    assert sum(parts.values()) <= smallest
    plan = make_plan(needs, Budget(smallest), workload, Options(), MACHINE)
    workspace = max(needs.need(tokens).workspace for tokens in (1, plan.schedule.prefill_chunk))
    assert plan.arenas["device"] + workspace == smallest
    if smallest > 1:
        with pytest.raises(PlanError, match=rf"the smallest that can is .*\({smallest} bytes: "):
            make_plan(needs, Budget(smallest - 1), workload, Options(), MACHINE)


def chosen_slot_nbytes(plan: Plan, needs: ModelNeeds) -> int:
    """Bytes of the slots that the planner compared for this plan; 0 where nothing streams."""
    budget, kinds = Budget(plan.budget.device, plan.budget.host), planner.kinds_of(needs, plan.workload)
    fit = planner._cheapest(needs, kinds, budget, plan.workload,
                            list(planner._candidates(needs, kinds, budget, plan.workload, Options())))
    assert fit is not None and (fit.slots, fit.chunk) == (plan.schedule.slots, plan.schedule.prefill_chunk)
    assert plan.schedule.slot_nbytes <= fit.slot_nbytes
    return fit.slot_nbytes


def predicted_s(plan: Plan, needs: ModelNeeds) -> float:
    """Prompt and answer by the costs that the planner compares with, every byte beside its alignment counted.

    Copies are counted as through slots of the size that was chosen; the plan's own are as large as the largest piece
    that streams, up to a row of each weight less.
    """
    s, w = plan.schedule, plan.workload
    products = [u for u in needs.uses if u.product and not (u.nbytes <= PAGE_NBYTES or u.rows == 1)]
    streams = sum(-(-p.nbytes // 64) * 64 for p, u in zip(plan.weights, needs.uses, strict=True)
                  if p.tier != "device" and u.product)
    total = sum(-(-u.nbytes // 64) * 64 for u in products)
    slot_nbytes = chosen_slot_nbytes(plan, needs)
    copies = streams / total * sum(-(-u.nbytes // slot_nbytes) for u in products) if streams else 0
    steps = ((-(-w.prompt // s.prefill_chunk), s.prefill_chunk), (w.new_tokens - 1, 1))
    return sum(count * needs.rates.step_time_s(tokens, streams, copies, s.slots) for count, tokens in steps)


rates = st.builds(lambda disk, flops, slowed, slows, share: Rates(
    disk, 1e-4, 2e-5, slowed, slows, lambda tokens: 1e-3 + tokens / flops, core_share=share),
    st.floats(1e6, 1e10), st.floats(1e2, 1e7), st.floats(1, 2), st.floats(1, 2), st.floats(0, 1))


@settings(deadline=None, max_examples=examples(200))
@given(needs(), rates, workloads, st.integers(0, 300_000), st.integers(0, 300_000))
def test_more_budget_never_predicts_slower(
    needs: ModelNeeds, rates: Rates, workload: Workload, extra: int, more: int
) -> None:
    needs = replace(needs, rates=rates, uses=[replace(u, tileable=True) if u.rows > 1 else u for u in needs.uses])
    smallest, _ = smallest_budget(needs, workload, Options())
    less = make_plan(needs, Budget(smallest + extra), workload, Options(), MACHINE)
    larger = make_plan(needs, Budget(smallest + extra + more), workload, Options(), MACHINE)
    assert predicted_s(larger, needs) <= predicted_s(less, needs) * (1 + 1e-9)


@settings(deadline=None, max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(2, 400), st.sampled_from([96, 512, 6000])), min_size=60, max_size=200),
       st.floats(0.1, 0.6), rates)
def test_streamed_bytes_are_near_the_bound_of_a_budget_fully_used(
    shapes: list[tuple[int, int]], share: float, rates: Rates
) -> None:
    """The bound uses the room beside everything else to the last byte. Whole weights, none of which exceeds 2 % of the
    budget, leave less than one of them unused: 5 % of what streams, where that is at least 40 % of the budget."""
    uses = [WeightUse(f"w{i}", rows * width, rows, True, False, True) for i, (rows, width) in enumerate(shapes)]
    model = ModelNeeds("f", uses, {}, {}, lambda tokens: PhaseNeed(1000 * tokens, 0), rates=rates)
    smallest, _ = smallest_budget(model, Workload(1, 4, 4), Options())
    total = sum(-(-u.nbytes // 64) * 64 for u in uses)
    budget = smallest + int(share * total)
    plan = make_plan(model, Budget(budget), Workload(1, 4, 4), Options(), MACHINE)
    resident = sum(-(-w.nbytes // 64) * 64 for w in plan.weights if w.tier == "device")
    bound = total - (resident + budget - plan.arenas["device"])
    chosen = total - resident
    assert bound <= chosen
    if bound >= 0.4 * budget and max(u.nbytes for u in uses) <= 0.02 * budget:
        assert chosen <= 1.05 * bound + 2 * PAGE_NBYTES


@settings(deadline=None, max_examples=examples(100))
@given(needs(), workloads, st.integers(1, 40))
def test_what_a_prefill_borrows_never_costs(needs: ModelNeeds, workload: Workload, chunk: int) -> None:
    """The arena is its lower part and the larger of prompt cache + prefill and whole cache + decode; a budget that
    works without borrowing works with it."""
    options = Options(prefill_chunk=chunk)
    smallest, _ = smallest_budget(needs, workload, options)
    apart, _ = smallest_budget(replace(needs, cache_prompt={}), workload, options)
    assert smallest <= apart
    plan = make_plan(needs, Budget(smallest), workload, options, MACHINE)
    if not plan.prefill_overlays_kv_cache:
        assert smallest == apart
        return
    here = [b for b in plan.buffers if b.arena == "device"]
    bottom = -(-max((b.offset + b.nbytes for b in here if b.kind != "cache"), default=0) // 64) * 64
    heights = []
    for phase, tokens in (("prefill", plan.schedule.prefill_chunk), ("decode", 1)):
        cache = sum(-(-b.nbytes // 64) * 64 for b in here if b.phase == phase)
        heights.append(cache + -(-needs.need(tokens).activations // 64) * 64)
        assert min(b.offset for b in here if b.phase == phase) == bottom
    assert plan.arenas["device"] == bottom + max(heights)
    for b in here:  # a cache only moves up
        assert b.phase != "prefill" or b.offset <= next(
            c.offset for c in here if (c.name, c.phase) == (b.name, "decode"))


def test_a_prompt_as_long_as_the_answer_borrows_half_the_cache() -> None:
    needs = replace(layers(2), cache={"cache": 64_000}, cache_prompt={"cache": 32_000})
    workload, options = Workload(1, 32, 32), Options(prefill_chunk=32)
    smallest, parts = smallest_budget(needs, workload, options)
    apart, separate = smallest_budget(replace(needs, cache_prompt={}), workload, options)
    # prefill takes 32 000 bytes of activations, a decode step 1 000: the cache's second half is theirs before
    assert apart - smallest == 32_000 - 1024
    assert (separate["activation"], parts["activation"]) == (32_000, 1024) and parts["cache"] == 64_000
    plan = make_plan(needs, Budget(smallest), workload, options, MACHINE)
    assert plan.prefill_overlays_kv_cache and meeting_of(plan) is not None


def layers(count: int, nbytes: int = 300_000, rows: int = 100) -> ModelNeeds:
    uses = [WeightUse(f"w{i}", nbytes, rows, True, False, True) for i in range(count)]
    return ModelNeeds("f", uses, {}, {"cache": 10_000}, lambda tokens: PhaseNeed(1000 * tokens, 100 * tokens))


@pytest.mark.parametrize("options", [Options(slots=2, slot_nbytes=60_000), Options(slots=3, slot_nbytes=10_000)])
def test_more_budget_never_streams_more_of_equal_layers(options: Options) -> None:
    model, workload = layers(12), Workload(1, 16, 8)
    smallest, _ = smallest_budget(model, workload, options)
    costs = []
    for budget in range(smallest, 12 * 300_000 + 500_000, 37_003):
        plan = make_plan(model, Budget(budget), workload, options, MACHINE)
        assert_sound(plan, model, Budget(budget))
        costs.append(passes(plan) * streamed(plan))
    assert costs == sorted(costs, reverse=True) and costs[0] > 0 and costs[-1] == 0
    assert len(set(costs)) > 10


@settings(deadline=None, max_examples=examples(100))
@given(needs(), workloads, st.integers(0, 400_000),
       st.builds(Options, slots=st.none() | st.integers(1, 6), slot_nbytes=st.none() | st.integers(50_000, 200_000),
                 lead=st.none() | st.integers(1, 6), prefill_chunk=st.none() | st.integers(1, 50)))
def test_options_are_honored(needs: ModelNeeds, workload: Workload, extra: int, options: Options) -> None:
    if options.slot_nbytes is not None:  # what cannot be tiled must fit
        options = replace(options, slot_nbytes=max(options.slot_nbytes, *(u.nbytes for u in needs.uses)))
    smallest, _ = smallest_budget(needs, workload, options)
    plan = make_plan(needs, Budget(smallest + extra), workload, options, MACHINE)
    assert_sound(plan, needs, Budget(smallest + extra))
    s = plan.schedule
    if s.slot_nbytes:  # something streams
        assert options.slots in (None, s.slots) and s.slot_nbytes <= (options.slot_nbytes or s.slot_nbytes)
        assert s.lead == min(options.lead or s.slots, s.slots)
    assert options.prefill_chunk is None or s.prefill_chunk == min(options.prefill_chunk, workload.prompt)
    with pytest.raises(PlanError, match=str(smallest)):
        make_plan(needs, Budget(smallest - 1), workload, options, MACHINE)


def test_a_slot_that_cannot_hold_a_row_is_refused() -> None:
    with pytest.raises(PlanError, match="slot_nbytes: 2000 is below"):
        make_plan(layers(4), Budget(600_000), Workload(1, 4, 4), Options(slot_nbytes=2000), MACHINE)


@pytest.mark.parametrize(("device_kind", "least", "most"), [
    ("cpu", 1 << 20, 8 << 20), ("NVIDIA H200", 16 << 20, 64 << 20)])
def test_slots_are_as_large_as_the_device_asks(device_kind: str, least: int, most: int) -> None:
    """A link of 50 GB/s that moves a tile of 4 MiB in 80 us waits for a thread that takes 100 us to issue it."""
    sizes = kind_of(device_kind).slot_nbytes
    rates = Rates(bytes_per_s=5e10, latency_s=1e-5, launch_s=1e-4, compute_s=lambda tokens: 1e-2)
    model = replace(layers(12, 112 << 20, 14336), rates=rates, slot_nbytes=sizes)
    plan = make_plan(model, Budget(8 * (112 << 20)), Workload(1, 16, 8), Options(), MACHINE)
    assert streamed(plan) and least < plan.schedule.slot_nbytes <= most


def test_everything_resident_where_it_fits_and_nothing_streams() -> None:
    plan = make_plan(layers(3), Budget(2_000_000), Workload(1, 4, 4), Options(), MACHINE)
    assert {w.tier for w in plan.weights} == {"device"} and plan.schedule.slot_nbytes == 0
    assert not [b for b in plan.buffers if b.kind == "slot"]


def test_buffers_that_begin_at_pages_leave_no_gap() -> None:
    plan = make_plan(layers(3), Budget(2_000_000), Workload(1, 4, 4), Options(), MACHINE)
    staged = [("routing", "routing", "device", 100, 64), ("admitted", "slot", "device", PAGE_NBYTES - 100, PAGE_NBYTES),
              ("pool", "pool", "device", 2 * PAGE_NBYTES, PAGE_NBYTES)]
    without, found = (lay_out(plan, {}, {}, 0, 0, each).arenas["device"] for each in ((), staged))
    assert 3 * PAGE_NBYTES <= found - without <= 3 * PAGE_NBYTES + 128


def test_resident_weights_are_spread_over_the_step() -> None:
    """Copies have compute beside them only if the weights that need none are not all at one end."""
    plan = make_plan(layers(12), Budget(2_100_000), Workload(1, 4, 4), Options(slots=2, slot_nbytes=50_000), MACHINE)
    resident = [i for i, w in enumerate(plan.weights) if w.tier == "device"]
    assert 4 <= len(resident) <= 8
    assert max(b - a for a, b in zip([-1, *resident], [*resident, 12], strict=True)) <= 4


def test_prefill_runs_in_chunks_where_the_whole_prompt_does_not_fit() -> None:
    """The prompt needs 200 kB of activations at once, a token 1 kB: a smaller chunk, not a refusal."""
    model, workload = layers(2), Workload(1, 200, 4)
    whole, _ = smallest_budget(model, workload, Options(prefill_chunk=200))
    smallest, _ = smallest_budget(model, workload, Options())
    assert smallest < whole
    plan = make_plan(model, Budget(smallest), workload, Options(), MACHINE)
    assert plan.schedule.prefill_chunk == 1
    assert make_plan(model, Budget(4 * whole), workload, Options(), MACHINE).schedule.prefill_chunk == 200


def test_a_weight_larger_than_the_budget_streams_in_tiles_and_one_that_cannot_is_refused() -> None:
    big = WeightUse("head", 4_000_000, 1000, True, True, True)
    needs = ModelNeeds("f", [big], {}, {}, lambda tokens: PhaseNeed(100, 0))
    plan = make_plan(needs, Budget(100_000), Workload(1, 1, 1), Options(), MACHINE)
    assert plan.weights[0].tile_rows * 4000 <= plan.schedule.slot_nbytes < 100_000 and plan.weights[0].gather
    whole = replace(needs, uses=[replace(big, tileable=False)])
    with pytest.raises(PlanError, match="smallest"):
        make_plan(whole, Budget(100_000), Workload(1, 1, 1), Options(), MACHINE)


def test_the_refusal_says_what_takes_the_bytes() -> None:
    message = r"1\.0 KiB cannot work for batch 1, prompt 4, 4 new tokens.*slot .*cache .*activation"
    with pytest.raises(PlanError, match=message):
        make_plan(layers(2), Budget(1024), Workload(1, 4, 4), Options(), MACHINE)


@pytest.mark.parametrize("forced", [{"slots": 1000}, {"slot_nbytes": 1 << 40}, {"slots": 500, "slot_nbytes": 1 << 20}])
def test_a_forced_choice_that_alone_overruns_the_budget_is_blamed(forced: dict[str, int]) -> None:
    least, _ = smallest_budget(layers(2), Workload(1, 4, 4), Options())
    names = ", ".join(f"{name}={value}" for name, value in forced.items())
    with pytest.raises(PlanError, match=f"^{names} cannot work .* left to the planner"):
        make_plan(layers(2), Budget(least), Workload(1, 4, 4), Options(**forced), MACHINE)
    with pytest.raises(PlanError, match=r"^a device budget of .* cannot work"):
        make_plan(layers(2), Budget(least - 1), Workload(1, 4, 4), Options(**forced), MACHINE)


@given(st.floats(1e-6, 1), st.floats(1e-6, 1), st.floats(1, 3), st.floats(1, 3), st.floats(1, 2))
def test_side_by_side_is_no_faster_than_the_longer_and_no_slower_than_one_after_the_other(
    compute: float, stream: float, slowed: float, slows: float, more: float
) -> None:
    time_s = side_by_side_s(compute, stream, slowed, slows)
    assert max(compute, stream) * (1 - 1e-9) <= time_s <= (compute + stream) * (1 + 1e-9)
    assert side_by_side_s(compute, stream, 1, 1) == pytest.approx(max(compute, stream))
    assert side_by_side_s(compute * more, stream, slowed, slows) >= time_s * (1 - 1e-9)
    assert side_by_side_s(compute, stream * more, slowed, slows) >= time_s * (1 - 1e-9)


def test_slots_follow_what_overlaps() -> None:
    """Disk-bound: few slots, as each takes room from resident weights. Balanced: more, as waiting costs more."""
    model = replace(layers(40), rates=Rates(3e9, 0.0, 2e-5, compute_s=lambda tokens: 1e-5))
    balanced = replace(model, rates=Rates(3e9, 0.0, 2e-5, compute_s=lambda tokens: 2.4e-3))
    budget, workload = Budget(4_000_000), Workload(1, 8, 64)
    few = make_plan(model, budget, workload, Options(), MACHINE).schedule
    many = make_plan(balanced, budget, workload, Options(), MACHINE).schedule
    assert 1 < few.slots < many.slots
