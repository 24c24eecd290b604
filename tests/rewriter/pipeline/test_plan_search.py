"""Ways to cut a batch, and the blocks of a cache on disk."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from families import rewritten
from hypothesis import given, settings
from hypothesis import strategies as st

import forebay.rewriter.pipeline.plan_search as module
from forebay.rewriter.capture.step_graphs import StepGraphs, step_graphs
from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Workload
from forebay.rewriter.ir.program import RETURN, Copy, FileSlice, Wait
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.ir.schedule.cache_placement import CachePlacement
from forebay.rewriter.ir.schedule.micro_batches import MicroBatches
from forebay.rewriter.machine.presets import load_machine_or_preset
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.plan_search import plan_batch
from forebay.rewriter.pipeline.plan_task import PlanTask
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.features.cache_placement import block_tokens
from forebay.rewriter.planning.features.micro_batches import MICRO_BATCH_SIZES
from forebay.rewriter.planning.graph_needs import launch_count
from forebay.rewriter.planning.objective import latency_s
from forebay.rewriter.planning.options import Options
from forebay.rewriter.predict.closed_form import rates_of
from forebay.rewriter.predict.estimator import MachineEstimator
from forebay.rewriter.switches import Switches
from forebay.rewriter.verify.program import ProgramError, verify_program

pytestmark = pytest.mark.usefixtures("planned_with_our_kernels")
WORK = Workload(9, 60, 20)


@given(st.integers(1, 8192))
def test_blocks_are_whole_pages_with_little_padding_where_that_can_be(token: int) -> None:
    tokens = block_tokens([token])

    def padding(count: int) -> float:
        return math.ceil(token / (PAGE_NBYTES // count)) * (PAGE_NBYTES // count) / token - 1

    assert all(padding(count) > 1 / 8 for count in (8, 16, 32, 64) if count < tokens)
    assert tokens == 64 or padding(tokens) <= 1 / 8


def staged(work: Workload, options: Options) -> list[BatchSchedule]:
    return PlanTask(graphs, Budget(1), work, options, Machine.default(), Switches()).schedules(staged=True)


@settings(deadline=None)  # the first makes graphs
@given(st.integers(1, 300))
def test_every_way_has_room_for_the_batch_and_none_is_empty(batch: int) -> None:
    work = replace(WORK, batch=batch)
    ways = staged(work, Options(cache_tokens=16))
    assert len({way.micro_batches.count for way in ways}) == len(ways) >= 1
    for way in ways:
        each = math.ceil(batch / way.micro_batches.count)
        assert 1 <= way.micro_batches.count <= batch and way.cache.tier == "disk"
        assert each <= max(MICRO_BATCH_SIZES)
    assert any(way.micro_batches.count == batch for way in ways)
    wished = staged(work, Options(micro_batches=7, order="row", cache_slots=4, cache_tokens=32))
    assert wished == [BatchSchedule(MicroBatches(min(7, batch), "row"), CachePlacement("disk", 32, 4))]
    assert staged(work, Options(cache_tier="host", cache_tokens=16))[0].cache.tier == "host"
    assert not staged(work, Options(cache_tier="device"))


def graphs(work: Workload, batching: BatchSchedule) -> StepGraphs:
    lm = rewritten("llama")
    files = {spec.name: FileSlice("weights", i << 24, spec.nbytes) for i, spec in enumerate(lm.weights.values())}
    return step_graphs(lm, files, work, "llama", batching=batching)


def needed(tier: str) -> int:
    """The smallest budget for a cache on this tier, of micro-batches of one on disk."""
    batching = BatchSchedule() if tier == "device" else BatchSchedule(MicroBatches(WORK.batch, "zigzag"),
                                                                      CachePlacement("disk", 16, 3))
    return Pipeline(graphs(WORK, batching), WORK, Machine.default(), Switches()).smallest_budget(Options())


@pytest.mark.parametrize("change", [
    {"on_device": 6, "on_host": 3}, {"on_host": 12}, {"on_host": 12, "cpu_attention": True}])
def test_other_shares_need_what_a_pipeline_of_their_own_finds(change: dict) -> None:
    """With what is known of the same turns, but for those that the host attends."""
    batching = BatchSchedule(MicroBatches(4, "zigzag"), CachePlacement("disk", 16, 3))
    work, machine = replace(WORK, batch=12), Machine.default()
    known = Pipeline(graphs(work, batching), work, machine, Switches())
    for tokens in (60, 8):
        known.need(tokens)
    other = replace(batching, cache=replace(batching.cache, **change))
    shared, own = known.with_batching(other), Pipeline(graphs(work, other), work, machine, Switches())
    assert [*shared.steps.needs] == ([] if other.cache.cpu_attention else [1, 60, 8])
    for tokens in (1, 8, 60, 30):
        assert shared.need(tokens) == own.need(tokens)
    assert shared.plan(Budget(1 << 22, 1 << 22)) == own.plan(Budget(1 << 22, 1 << 22))
    if other.cache.cpu_attention:
        assert own.need(1) != known.need(1)


def test_a_cache_that_fits_the_device_stays_there() -> None:
    for options, count in ((Options(), 1), (Options(micro_batches=3), 3)):
        _, plan = plan_batch(PlanTask(graphs, Budget(1 << 24), WORK, options, Machine.default(), Switches()))
        assert plan.schedule.batching == BatchSchedule(MicroBatches(count))


def test_one_that_does_not_goes_to_disk_in_the_fastest_way() -> None:
    work = Workload(24, 200, 50)
    device = Pipeline(graphs(work, BatchSchedule()), work, Machine.default(), Switches()).smallest_budget(Options())
    budget = Budget(device - 200_000)
    with pytest.raises(PlanError, match="cannot work for batch 24"):
        plan_batch(PlanTask(graphs, budget, work, Options(cache_tier="device"), Machine.default(), Switches()))
    _, plan = plan_batch(PlanTask(graphs, budget, work, Options(), Machine.default(), Switches()))
    assert plan.schedule.batching.cache.tier == "disk" and plan.workload.batch >= 24
    for count in (3, 6, 24):
        options = Options(micro_batches=count)
        _, other = plan_batch(PlanTask(graphs, budget, work, options, Machine.default(), Switches()))
        assert latency_s(plan) <= latency_s(other)


def test_host_memory_takes_caches_where_it_is_given() -> None:
    """No slower by the Programs than with all on disk, and within both budgets."""
    work = Workload(24, 200, 50)
    staged = graphs(work, BatchSchedule(MicroBatches(6, "zigzag"), CachePlacement("disk", 16, 3)))
    device = Pipeline(staged, work, Machine.default(), Switches()).smallest_budget(Options())
    plans = {}
    for host in (0, 1 << 20, 1 << 24):
        budget = Budget(device + 200_000, host)
        _, plan = plan_batch(PlanTask(graphs, budget, work, Options(micro_batches=6), Machine.default(), Switches()))
        assert plan.arenas.get("host", 0) <= host and plan.arenas["device"] <= budget.device
        plans[host] = plan
    assert plans[0].schedule.batching.cache.on_host == 0
    assert plans[1 << 20].schedule.batching.cache.on_host > 0
    assert latency_s(plans[1 << 24]) <= latency_s(plans[1 << 20]) <= latency_s(plans[0])


def test_where_nothing_fits_the_smallest_need_is_named() -> None:
    least = min(needed("device"), needed("disk"))
    with pytest.raises(PlanError, match=r"the smallest that can is .*?\((\d+) bytes") as refused:
        plan_batch(PlanTask(graphs, Budget(1000), WORK, Options(), Machine.default(), Switches()))
    named = int(str(refused.value).split(" bytes: ")[0].rsplit("(", 1)[1])
    assert named <= least
    plan_batch(PlanTask(graphs, Budget(named), WORK, Options(), Machine.default(), Switches()))
    with pytest.raises(PlanError, match="the smallest that can is"):
        plan_batch(PlanTask(graphs, Budget(named - 1), WORK, Options(), Machine.default(), Switches()))


def on_gpu(work: Workload, batching: BatchSchedule) -> StepGraphs:
    return replace(graphs(work, batching), host_hop=True)


@pytest.mark.parametrize("slots", [2, 4])
def test_with_few_slots_the_smallest_named_is_enough(slots: int) -> None:
    """Micro-batches that take turns hold a layer's weights: with fewer slots than their tiles more stays resident."""
    options = Options(slots=slots, cache_tier="disk", micro_batches=3)
    with pytest.raises(PlanError, match=r"the smallest that can is .*?\((\d+) bytes") as refused:
        plan_batch(PlanTask(graphs, Budget(20_000), WORK, options, Machine.default(), Switches()))
    least = int(re.search(r"\((\d+) bytes", str(refused.value))[1])
    for budget in (least, 5 * least // 4):
        _, plan = plan_batch(PlanTask(graphs, Budget(budget), WORK, options, Machine.default(), Switches()))
        assert plan.schedule.slots in (0, slots)
    with pytest.raises(PlanError):
        plan_batch(PlanTask(graphs, Budget(least - 1), WORK, options, Machine.default(), Switches()))


def test_on_a_gpu_the_host_attends_where_that_is_faster() -> None:
    """Caches in host memory that all would cross a slow link for each token, or only queries and results; on this
    machine or on one whose host attends at a hundredth of the rate."""
    work, budget = Workload(64, 64, 32), Budget(80 << 20, 1 << 28)
    t4 = load_machine_or_preset("t4")
    t4 = replace(t4, links=tuple(replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / 50)
                                 for link in t4.links))  # else issuing copies of so small a model binds
    found = {}
    for rate in (t4.host_attention_bytes_per_s, t4.host_attention_bytes_per_s / 100):
        machine = replace(t4, host_attention_bytes_per_s=rate)
        task = PlanTask(on_gpu, budget, work, Options(cache_tier="host", micro_batches=4), machine, Switches())
        ways = {wish: plan_batch(task.for_batch(work.batch, cpu_attention=wish))[1] for wish in (True, False, None)}
        taken = ways[None].schedule.batching.cache.cpu_attention
        assert taken is (latency_s(ways[True]) < latency_s(ways[False]))
        assert latency_s(ways[None]) == min(map(latency_s, ways.values()))
        found[rate] = taken
    assert list(found.values()) == [True, False]


@pytest.mark.parametrize("count", [4, 16])
def test_beside_a_gpu_a_region_is_loaded_into_behind_what_was_stored_of_it(count: int) -> None:
    """Also where the next of its micro-batches takes its turn at once: without that wait it is refused."""
    work, budget = Workload(32, 32, 8), Budget(80 << 20, 1 << 28)
    options = Options(cache_tier="host", micro_batches=count, hidden_tier="host", prefill_chunk=16)
    pipeline, plan = plan_batch(PlanTask(on_gpu, budget, work, options, load_machine_or_preset("t4"), Switches()))
    program = pipeline.program(plan, 16)
    loads = [i for i, item in enumerate(program.step) if isinstance(item, Copy) and item.stream == RETURN
             and item.label.startswith("load") and item.label.endswith("@0") and "cache" not in item.label]
    waits = [i - 1 for i in loads if isinstance(program.step[i - 1], Wait)]
    assert plan.schedule.batching.hidden.slots == 3 and waits
    for i in waits:
        with pytest.raises(ProgramError):
            verify_program(replace(program, step=program.step[:i] + program.step[i + 1 :]), {})


def test_few_ways_are_simulated_and_the_best_of_all_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a GPU, where shares on three tiers and the host's attention make hundreds of ways."""
    work, budget, t4 = Workload(48, 64, 32), Budget(80 << 20, 1 << 28), load_machine_or_preset("t4")

    def every(ways: list, known: list, simulate: Callable) -> list:
        tried.extend(ways)
        return [(latency_s(plan), way.time_s) for way in ways if (plan := simulate(way)) is not None]

    few, tried = module._try_near, list[object]()
    taken = []
    for found in (few, every):
        plans = list[Plan]()
        monkeypatch.setattr(module, "_try_near", found)
        plan = Pipeline.plan
        monkeypatch.setattr(Pipeline, "plan", lambda *a, plan=plan, plans=plans: plans.append(p := plan(*a)) or p)
        _, best = plan_batch(PlanTask(on_gpu, budget, work, Options(cache_tier="host"), t4, Switches()))
        monkeypatch.setattr(Pipeline, "plan", plan)
        taken.append((len(plans), latency_s(best)))
    assert taken[0][0] <= 12 < len(tried)
    assert taken[0][1] <= 1.05 * taken[1][1]


def test_without_a_gpu_it_attends_only_where_that_is_wished() -> None:
    options = Options(cache_tier="host", micro_batches=3)
    for wish, expected in ((None, False), (True, True)):
        machine = replace(Machine.default(), host_attention_bytes_per_s=1e15)
        _, plan = plan_batch(PlanTask(graphs, Budget(needed("disk") * 2, 1 << 24), WORK,
                                      replace(options, cpu_attention=wish), machine, Switches()))
        assert plan.schedule.batching.cache.cpu_attention is expected


def test_launches_are_counted_as_programs_have_them() -> None:
    """And what issuing them takes, in each part, where one candidate is compared with another."""
    pipeline = Pipeline(graphs(WORK, BatchSchedule()), WORK, Machine.default(), Switches())
    plan = pipeline.plan(Budget(1 << 28))
    counts = {launch_count(pipeline.graphs.step(tokens)) for tokens in (1, plan.schedule.prefill_chunk)}
    assert counts == {len(list(pipeline.program(plan, 1).launches()))}
    rates = [rates_of(MachineEstimator(Machine.default()), (), 9, "disk", batching=BatchSchedule(MicroBatches(3)),
                      launches=n) for n in (0, 7)]
    assert rates[1].compute_s(1) - rates[0].compute_s(1) == pytest.approx(3 * 7 * Machine.default().dispatch_s)


@pytest.mark.usefixtures("planned_with_our_kernels")
def test_hidden_states_leave_the_device_for_larger_chunks_where_weights_bind() -> None:
    """On a machine that computes in next to no time each pass over the weights counts; on one that does not it is not
    even tried, and where that is wished they stay."""
    slow = Machine.default()
    links = tuple(replace(link, latency_s=1e-7, bandwidth_bytes_per_s=1.5e9) for link in slow.links)
    fast = replace(slow, dispatch_s=0.0, copy_issue_s=0.0, row_request_s=0.0, attention_bytes_per_s=4e12,
                   memory_bytes_per_s=4e12, links=links,
                   gemm=tuple(replace(point, time_s=point.time_s / 1000) for point in slow.gemm))
    work, options = Workload(4, 64, 4), Options(cache_tier="disk", micro_batches=4)
    staged = graphs(work, BatchSchedule(MicroBatches(4, "zigzag"), CachePlacement("disk", 16, 3)))
    budget = Budget(int(1.05 * Pipeline(staged, work, fast, Switches()).smallest_budget(Options())))
    _, away = plan_batch(PlanTask(graphs, budget, work, options, fast, Switches()))
    _, stays = plan_batch(PlanTask(graphs, budget, work, replace(options, hidden_tier="device"), fast, Switches()))
    _, other = plan_batch(PlanTask(graphs, budget, work, options, slow, Switches()))
    assert (away.schedule.batching.hidden.tier, stays.schedule.batching.hidden.tier,
            other.schedule.batching.hidden.tier) == (
        "disk", "device", "device")
    assert away.schedule.prefill_chunk > stays.schedule.prefill_chunk
    assert latency_s(away) < latency_s(stays)
