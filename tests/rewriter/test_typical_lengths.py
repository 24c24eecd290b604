"""Room is for the longest prompt and answer, times are those of the usual ones."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import pytest

from forebay.commands.plan_config import PlanRequest, plan_config
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Schedule, Workload, plan_from_dict
from forebay.rewriter.ir.prefill_chunks import chunk_sizes, chunk_steps
from forebay.rewriter.ir.schedule.admission import Admission
from forebay.rewriter.ir.schedule.batch_schedule import ALONE, BatchSchedule
from forebay.rewriter.machine.presets import load_machine_or_preset
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.plan_search import plan_slots
from forebay.rewriter.pipeline.plan_task import PlanTask
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.objective import latency_s, sequence_time_s
from forebay.rewriter.planning.options import Options, check_choices
from forebay.rewriter.policy.block_costs import BlockShape
from forebay.rewriter.policy.policy_search import Problem
from forebay.rewriter.predict.model_shapes import load_model_shape
from forebay.rewriter.predict.of_programs import predict, step_times
from forebay.rewriter.predict.simulate import simulate
from forebay.rewriter.report.explain import explain_plan
from forebay.rewriter.switches import Switches
from tests.rewriter.pipeline.test_plan_search import graphs

pytestmark = pytest.mark.usefixtures("planned_with_our_kernels")
LONGEST = Workload(100, 400, 100)
USUAL = replace(LONGEST, typical_prompt=40, typical_new_tokens=20)
BATCH_SLOTS = BatchSchedule(admission=Admission(1))
SLOW = replace(Machine.default(), attention_bytes_per_s=1e6, attention_flops=1e9)  # its attention is what binds


def places_of(
    job: Workload, budget: int = 16 << 20, batch_slots: int | None = 8, **options: Any
) -> tuple[Pipeline, Plan]:
    wished = Options(cache_tier="device", **options)
    return plan_slots(PlanTask(graphs, Budget(budget), job, wished, SLOW, Switches()), batch_slots)


def test_lengths_that_are_not_named_are_the_longest() -> None:
    assert LONGEST.typical == (400, 100)
    assert LONGEST.effective_lengths(BATCH_SLOTS) == LONGEST.effective_lengths(ALONE) == (400, 100)
    assert (LONGEST.before(1, ALONE), LONGEST.before(100, ALONE), LONGEST.before(500, ALONE)) == (450, 150, 0)
    assert USUAL.typical == (40, 20) and USUAL.context == LONGEST.context == 500
    assert USUAL.of(3, 30, 50) == Workload(3, 30, 50, 30, 20) and LONGEST.of(3, 30, 50) == Workload(3, 30, 50)


def test_sequences_that_begin_together_wait_for_the_longest() -> None:
    assert USUAL.effective_lengths(ALONE) == (400, 100) and USUAL.before(100, ALONE) == 150
    assert USUAL.effective_lengths(BATCH_SLOTS) == (40, 20)
    assert USUAL.before(16, BATCH_SLOTS) == 12 and USUAL.before(100, BATCH_SLOTS) == 0
    assert replace(USUAL, batch=1).effective_lengths(ALONE) == (40, 20), "one waits for nobody"
    assert USUAL.before(1, ALONE) == USUAL.before(1, BATCH_SLOTS) == 50, "each attends to its own tokens"


@pytest.mark.parametrize("largest", [1, 15, 37, 64, 400])
def test_chunks_of_a_prompt_are_those_that_run(largest: int) -> None:
    """As `Prefill` takes them: the smallest planned one that holds what is left, else the largest."""
    schedule = Schedule(prefill_chunks=chunk_sizes(largest))
    for prompt in range(1, 3 * largest + 2):
        ran: dict[int, int] = {}
        done = 0
        while done < prompt:
            chunk = schedule.chunk_for(prompt - done)
            ran[chunk] = ran.get(chunk, 0) + 1
            done += chunk
        assert chunk_steps(prompt, schedule.prefill_chunks) == ran


def test_room_is_for_the_longest_and_times_are_the_usual_ones() -> None:
    (_, whole), (pipeline, typical) = places_of(LONGEST, prefill_chunk=50), places_of(USUAL, prefill_chunk=50)
    assert (whole.workload.batch, typical.workload.batch) == (8, 8) and typical.schedule == whole.schedule
    assert typical.arenas == whole.arenas and typical.buffers == whole.buffers, "every prompt has room"
    assert typical.workload == replace(USUAL, batch=8)
    assert pipeline.program(typical, 1).seen == {1: 51.0}, "40 + 20 / 2 tokens, and its own"
    shorter = typical.prediction.decode_time_s / whole.prediction.decode_time_s
    assert shorter == pytest.approx(51 / 451, rel=0.1), "attention binds, and grows with what it sees"
    assert typical.prediction.prefill_time_s < whole.prediction.prefill_time_s / 8, "one chunk of eight"
    assert sequence_time_s(typical) < sequence_time_s(whole) / 8
    assert typical.prediction.peak_nbytes == whole.prediction.peak_nbytes


@pytest.mark.all
def test_jobs_of_equal_room_may_want_other_plans() -> None:
    """Half a chunk leaves room for more slots: worth it where prompts are usually far shorter than a chunk."""
    found = {job: places_of(job, 4 << 20, batch_slots=None)[1] for job in (LONGEST, USUAL)}
    assert found[USUAL].workload.batch > found[LONGEST].workload.batch
    assert found[USUAL].schedule.prefill_chunk < found[LONGEST].schedule.prefill_chunk
    other = places_of(USUAL, 4 << 20, batch_slots=found[LONGEST].workload.batch)[1]
    assert sequence_time_s(found[USUAL]) < sequence_time_s(other)


def test_all_of_a_cache_is_more_than_what_is_usually_seen() -> None:
    """The times between which a service's steps lie are of caches that are empty and full, whatever is usual."""
    pipeline, plan = places_of(USUAL)
    found = {job: step_times(made, lambda tokens, p=p, made=made: p.program(made, tokens), SLOW).seconds[1]  # type: ignore[misc]
             for job, (p, made) in {USUAL: (pipeline, plan), LONGEST: places_of(LONGEST)}.items()}
    assert found[USUAL] == pytest.approx(found[LONGEST]) and found[USUAL][0] < found[USUAL][1]
    typical = found[USUAL][0] + 51 / 500 * (found[USUAL][1] - found[USUAL][0])
    assert plan.prediction.decode_time_s == pytest.approx(typical, rel=0.01)


def test_what_runs_between_prompt_and_answer_is_the_prompts() -> None:
    """A cache that is moved to its wider place, once an answer."""
    work = Workload(4, 300, 200)
    pipeline = Pipeline(graphs(work, ALONE), work, SLOW, Switches())
    plan = pipeline.plan(Budget(pipeline.smallest_budget()), Options())
    growth = pipeline.growth(plan)
    assert plan.prefill_overlays_kv_cache and growth is not None
    with_s, without_s = (predict(plan, lambda tokens: pipeline.program(plan, tokens), SLOW, each).prefill_time_s
                         for each in (growth, None))
    assert plan.prediction.prefill_time_s == with_s
    assert with_s - without_s == pytest.approx(simulate(growth, SLOW, 1).time_s) and with_s > without_s


def test_a_plan_says_what_is_usual() -> None:
    _, plan = places_of(USUAL)
    assert "; times are for typical lengths, 40 and 20 tokens" in explain_plan(plan)
    assert "typical lengths" not in explain_plan(places_of(LONGEST)[1])


@pytest.mark.parametrize(
    ("field", "value"), [("typical_prompt", 401), ("typical_new_tokens", 101), ("typical_prompt", -1)])
def test_usual_lengths_beyond_the_longest_are_refused(field: str, value: int) -> None:
    _, plan = places_of(USUAL)
    bad = replace(plan, workload=replace(plan.workload, **{field: value}))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=rf"plan\.workload\.{field}: {value}"):
        plan_from_dict(json.loads(bad.to_json()))


def test_options_for_usual_lengths_beyond_the_longest_are_refused() -> None:
    with pytest.raises(PlanError, match=r"typical: 401 tokens are more than the longest has \(prompt=400\)"):
        check_choices(replace(USUAL, typical_prompt=401), Options())
    check_choices(USUAL, Options())


@pytest.mark.parametrize("typical", [(1,), (1, 2, 3), (0, 5), (2.5, 3), 7, "1,2"])
def test_what_is_no_pair_of_lengths_is_refused(typical: Any) -> None:
    with pytest.raises(PlanError, match=r"typical must be two whole numbers of at least 1"):
        Options(typical=typical)
    assert Options(typical=[3, 4]).typical == (3, 4)  # type: ignore[arg-type]


def test_a_config_is_planned_for_usual_lengths() -> None:
    request = PlanRequest("opt-1.3b", "t4", 512, 64, batch=4)
    times = {}
    for typical in (None, (512, 64), (64, 16)):
        plan = plan_config(replace(request, typical=typical)).plan
        assert plan.workload == Workload(4, 512, 64, *(typical or ()))
        times[typical] = plan.prediction.decode_time_s, latency_s(plan)
    assert times[None] == times[512, 64] and all(a < b for a, b in zip(times[64, 16], times[None], strict=True))
    with pytest.raises(PlanError, match="typical: 513 tokens are not between 1 and the longest's 512"):
        plan_config(replace(request, typical=(513, 1)))


def test_placements_have_room_for_the_longest_and_times_of_the_usual() -> None:
    problem = Problem(load_model_shape("opt-1.3b"), load_machine_or_preset("t4"), 512, 64)
    block = BlockShape(4, 2)
    longest, typical = (replace(problem, typical=each).costs(block) for each in (None, (64, 16)))
    short = replace(problem, prompt=64, new_tokens=16).costs(block)
    assert typical.tokens == short.tokens == 8 * 16 < longest.tokens
    for tier, phase in itertools.product(longest.memory, ("prefill", "decode")):
        x = [0.0] * (len(longest.memory[tier]) - 1) + [1.0]
        assert math.isclose(typical.time_s(x, phase), short.time_s(x, phase))
        assert typical.time_s(x, phase) < longest.time_s(x, phase)
        assert (typical.memory[tier] == longest.memory[tier]).all()
