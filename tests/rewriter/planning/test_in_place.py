"""Weights that a GPU reads in host memory: plans by the rate at which it does, what they are predicted to take, and the
proof of their Programs."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from families import rewritten

from forebay.rewriter.capture.step_graphs import step_graphs
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Workload, plan_from_dict
from forebay.rewriter.ir.program import COMPUTE, DOWNLOAD, HOST, UPLOAD, Copy, FileSlice, Item, Launch, Program, Span
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.options import Options
from forebay.rewriter.predict.simulate import simulate
from forebay.rewriter.switches import Switches
from forebay.rewriter.verify.program import ProgramError, verify_program

GPU = replace(Machine.default(), device_kind="NVIDIA H200")
OWN = GPU.tiers["device"].bandwidth_bytes_per_s
WORK = Workload(batch=2, prompt=40, new_tokens=4)
LEFT = 8  # of the least budget's weights, the part that the device has room for in addition


def pipeline(rate: float, work: Workload = WORK, kind: str = GPU.device_kind) -> Pipeline:
    lm = rewritten("llama")
    files = {spec.name: FileSlice("weights", i << 24, spec.nbytes) for i, spec in enumerate(lm.weights.values())}
    graphs = step_graphs(lm, files, work, "llama", host_hop=True)
    return Pipeline(graphs, work, replace(GPU, device_kind=kind, host_read_bytes_per_s=rate), Switches())


def weights_nbytes(made: Pipeline) -> int:
    return sum(u.nbytes for u in made.needs.uses)


def planned(made: Pipeline, host: int | None = None) -> Plan:
    """Within the least device memory and a part of the weights, and host memory for them all, or so much."""
    device = made.smallest_budget(Options()) + weights_nbytes(made) // LEFT
    return made.plan(Budget(device, 2 * weights_nbytes(made) if host is None else host))


def in_place(plan: Plan) -> list[str]:
    return [w.name for w in plan.weights if w.in_place]


def uploads(program: Program) -> list[Copy]:
    return [item for item in program.step if isinstance(item, Copy) and item.stream == UPLOAD]


def test_the_rate_decides() -> None:
    """As fast as its own memory: nothing is copied. Much slower than the link: all is, as without the figure."""
    fast, slow, none = (pipeline(rate) for rate in (OWN, OWN / 1000, 0.0))
    plans = [planned(made) for made in (fast, slow, none)]
    assert [bool(in_place(plan)) for plan in plans] == [True, False, False]
    assert plans[0].schedule.slots == 0 and not uploads(fast.program(plans[0], 1))
    assert plans[1].weights == plans[2].weights and uploads(slow.program(plans[1], 1))
    assert plans[0].prediction.decode_time_s < plans[1].prediction.decode_time_s
    assert plans[0].prediction.streamed_nbytes == 0 < plans[1].prediction.streamed_nbytes


def test_a_launch_takes_as_long_as_its_bytes_do_at_that_rate() -> None:
    made = pipeline(OWN)
    plan = planned(made)
    program = made.program(plan, 1)
    slow = replace(GPU, host_read_bytes_per_s=OWN / 100, dispatch_s=0.0)
    far = sum(span.nbytes for item in program.step if isinstance(item, Launch) for span in item.reads
              if span.arena == HOST and "embed" not in span.buffer)
    assert far > weights_nbytes(made) // 2
    timeline = simulate(program, slow)
    assert timeline.busy_time_s[COMPUTE] == pytest.approx(far / (OWN / 100), rel=0.2)
    assert simulate(program, replace(GPU, host_read_bytes_per_s=OWN)).time_s < timeline.time_s / 10


@pytest.mark.parametrize("seed", range(6))
def test_random_plans_are_proved_and_keep_to_their_budgets(seed: int) -> None:
    """Of any budgets and rates; what the device reads in place is never predicted to take longer than copies."""
    chosen = random.Random(seed)
    work = Workload(chosen.randint(1, 3), chosen.randint(2, 40), chosen.randint(2, 9))
    made, without = (pipeline(rate, work) for rate in (OWN * 10 ** chosen.uniform(-2, 0.5), 0.0))
    weights, least = weights_nbytes(made), made.smallest_budget(Options())
    budget = Budget(least + int(weights * chosen.random()), int(weights * chosen.uniform(0.3, 1.5)))
    plan = made.plan(budget)
    assert {*in_place(plan)} <= {w.name for w in plan.weights if w.tier == HOST} and made.replay(plan) == plan
    for tokens in plan.schedule.step_sizes:
        program = made.program(plan, tokens)  # proved
        for tier, limit in (("device", budget.device), (HOST, budget.host)):
            assert plan.arenas.get(tier, 0) + program.workspace_nbytes(tier) <= (limit or 0)
        read = {span.buffer for item in program.step if isinstance(item, Launch) for span in item.reads
                if span.arena == HOST}
        assert read <= {*in_place(plan)} == program.in_place
    closed = [each._choose(budget, Options()).prediction for each in (made, without)]
    assert closed[0].decode_time_s <= 1.05 * closed[1].decode_time_s or (
        closed[0].prefill_time_s < closed[1].prefill_time_s)


def test_the_proof_knows_such_operands() -> None:
    """None that the Program does not declare, and none that is overwritten while a launch may read it."""
    made = pipeline(OWN)
    program = made.program(planned(made), 1)
    verify_program(program, {})
    with pytest.raises(ProgramError, match="in the host arena, which it cannot reach"):
        verify_program(replace(program, in_place=frozenset()), {})
    place, span = next((i, span) for i, item in enumerate(program.step) if isinstance(item, Launch)
                       for span in item.reads if span.arena == HOST)
    source = next(iter(s for s in program.resident.values() if s.arena == "device" and s.nbytes >= 64))
    copy = Copy(DOWNLOAD, Span("device", source.offset, 64, source.buffer), Span(HOST, span.offset, 64, "other"),
                "late")
    for at in (place, place + 1):
        with pytest.raises(ProgramError, match=span.buffer):
            verify_program(_with(program, at, copy), {})


def _with(program: Program, at: int, item: Item) -> Program:
    step: Sequence[Item] = program.step
    return replace(program, step=(*step[:at], item, *step[at:]))


def test_what_no_kernel_reads_in_place_is_refused() -> None:
    made = pipeline(OWN)
    plan = planned(made)
    with pytest.raises(PlanError, match=r"plan\.weights\[\d+\]\.in_place: kernels of .* host_read_bytes_per_s"):
        pipeline(0.0).replay(replace(plan, prediction=type(plan.prediction)()))
    i = next(i for i, w in enumerate(plan.weights) if w.tier == "device")
    wrong = tuple(replace(w, in_place=True) if n == i else w for n, w in enumerate(plan.weights))
    with pytest.raises(PlanError, match=rf"plan\.weights\[{i}\]\.in_place: kernels read a whole weight"):
        plan_from_dict(json.loads(replace(plan, weights=wrong).to_json()))
