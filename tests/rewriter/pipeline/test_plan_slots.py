"""How many slots a job's sequences enter, and where their caches lie."""

from __future__ import annotations

from typing import Any

import pytest
from families import llama
from selection import ALL

from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.capture.step_graphs import StepGraphs, step_graphs
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Workload
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.ir.schedule.admission import Admission
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.plan_search import plan_answers, plan_slots
from forebay.rewriter.pipeline.plan_task import PlanTask
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.planning.features.admission import admitted_at_once
from forebay.rewriter.planning.objective import sequence_time_s
from forebay.rewriter.planning.options import Options
from forebay.rewriter.switches import Switches
from tests.rewriter.pipeline.test_plan_search import graphs

pytestmark = pytest.mark.usefixtures("planned_with_our_kernels")
JOB = Workload(100, 60, 40)


def places_of(budget: int, job: Workload = JOB, wished: int | None = None, **options: Any) -> Plan:
    wish = Options(**{"cache_tier": "device"} | options)
    return plan_slots(PlanTask(graphs, Budget(budget), job, wish, Machine.default(), Switches()), wished)[1]


def test_a_job_has_the_places_that_take_least_time_a_sequence() -> None:
    budget = 4 << 20
    plan = places_of(budget)
    assert 1 < plan.workload.batch < JOB.batch
    assert plan.schedule.batching == BatchSchedule(admission=Admission(admitted_at_once(plan.workload.batch) or 0))
    assert min(plan.schedule.prefill_chunks) >= 16
    for size in (2, 8, 32, 64) if ALL else (2, 32):
        try:
            other = places_of(budget, wished=size)
        except PlanError:
            continue
        assert other.workload.batch == size and sequence_time_s(plan) <= sequence_time_s(other)


def test_more_memory_is_never_predicted_to_take_longer_a_sequence() -> None:
    times = [sequence_time_s(places_of(budget)) for budget in (2 << 20, 4 << 20, 8 << 20, 64 << 20)]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]


def test_sequences_that_all_find_room_are_one_batch() -> None:
    for wished in (3, 8):
        plan = places_of(1 << 28, Workload(3, 60, 40), wished)
        assert plan.workload.batch == 3 and plan.schedule.batching == BatchSchedule()


def test_a_job_that_fits_nowhere_is_refused_for_one_place() -> None:
    with pytest.raises(PlanError, match=r"cannot work for batch 1, .*the smallest that can is .*?\d+ bytes") as refused:
        places_of(1000)
    named = int(str(refused.value).split(" bytes: ")[0].rsplit("(", 1)[1])
    assert places_of(named).workload.batch == 1
    with pytest.raises(PlanError, match="cannot work for batch 64"):
        places_of(named, wished=64)


def test_a_prompt_of_one_token_enters() -> None:
    plan = places_of(1 << 28, Workload(100, 1, 5), 8)
    assert plan.workload.prompt == 3 and plan.schedule.prefill_chunks == (3,)


def test_answers_begin_together_where_the_device_caches_them() -> None:
    for budget, admitted in ((1 << 28, False), (4 << 20, True)):
        _, plan = plan_answers(PlanTask(graphs, Budget(budget), JOB, Options(), Machine.default(), Switches()))
        assert bool(plan.schedule.batching.admitted) is admitted and (plan.workload.batch == JOB.batch) is not admitted
    on_disk = Options(cache_tier="disk")
    _, plan = plan_answers(PlanTask(graphs, Budget(4 << 20), JOB, on_disk, Machine.default(), Switches()))
    assert plan.schedule.batching.cache.tier == "disk" and plan.workload.batch >= JOB.batch


def test_caches_off_the_device_where_more_places_take_less_time_a_sequence() -> None:
    """Weights of 120 MB stream for each step, and the device caches two sequences: more of them, on disk, share it."""
    captured = rewrite_captured(capture_model(llama(8, hidden_size=512, intermediate_size=2048)), Switches())
    files = {spec.name: FileSlice("weights", i << 24, spec.nbytes) for i, spec in enumerate(captured.weights.values())}

    def large(work: Workload, batching: BatchSchedule) -> StepGraphs:
        return step_graphs(captured, files, work, "llama", batching=batching)

    def planned(budget: int, tier: Any = None) -> Plan:
        job, machine = Workload(8, 300, 200), Machine.default()
        return plan_slots(PlanTask(large, Budget(budget), job, Options(cache_tier=tier), machine, Switches()))[1]

    plan, on_device = planned(32 << 20), planned(32 << 20, "device")
    batching = plan.schedule.batching
    assert batching.cache.staged and not on_device.schedule.batching.cache.staged
    assert batching.admitted == (admitted_at_once(plan.workload.batch) if plan.workload.batch < 8 else 0)
    assert plan.workload.batch > on_device.workload.batch
    assert sequence_time_s(plan) < 0.7 * sequence_time_s(on_device)
    assert sum(plan.arenas.values()) <= 32 << 20
    assert not planned(1 << 30).schedule.batching.cache.staged


def test_places_with_caches_on_several_tiers() -> None:
    """Whole layers of them, so that sequences may enter any place."""
    options: dict[str, Any] = {"cache_shares": (0.3, 0.4), "micro_batches": 2, "cache_tokens": 16}
    _, plan = plan_slots(PlanTask(graphs, Budget(64 << 20, 64 << 20), JOB, Options(cache_tier="disk", **options),
                          Machine.default(), Switches()), 16)
    batching = plan.schedule.batching
    homes = batching.cache_homes(3)
    assert batching.admitted == 2 and {len(set(of_layer)) for of_layer in homes} == {1}
    assert batching.cache.on_device == 0 and batching.cache.on_host == 2  # of six, in pairs
