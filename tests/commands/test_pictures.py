"""What the pictures of a plan and of a run are drawn from."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
from serving.served import save_model

from forebay.api import wrap
from forebay.commands.options import require_picture
from forebay.commands.pictures import draw_run, draw_step, throughput_roofs
from forebay.commands.process_memory import MemoryWatch
from forebay.commands.terminal import JobError
from forebay.rewriter.ir.plan import Plan, PlanError
from forebay.rewriter.ir.program import Program
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.predict.simulate import simulate

Step = tuple[Plan, Program, Machine]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Step:
    """A plan that streams, its decode step, and its machine."""
    save_model(folder := tmp_path_factory.mktemp("small"), 2)
    shape = {"batch": 3, "prompt": 16, "new_tokens": 8}
    with wrap(folder, 1 << 30, **shape) as lm:
        budget = lm.steps.pipeline.smallest_budget() + lm.captured.weight_nbytes // 8
    with wrap(folder, budget, **shape) as lm:
        return lm.plan, lm.steps.program(1), lm.steps.pipeline.machine


def test_no_step_is_faster_than_what_each_resource_allows(planned: Step) -> None:
    plan, program, machine = planned
    roofs = throughput_roofs(plan, program, machine)
    assert {"disk", "memory", "compute"} == roofs.keys()
    batch = plan.workload.batch
    allowed = min(min(each * batch, most) for each, most in roofs.values())
    assert batch / simulate(program, machine).time_s <= 1.02 * allowed
    streamed = sum(w.nbytes for w in plan.weights if w.tier == "disk" and not w.gather)
    link = machine.link("disk", "device").bandwidth_bytes_per_s
    assert roofs["disk"] == (pytest.approx(link / streamed), math.inf)
    halved = replace(machine, links=tuple(replace(x, bandwidth_bytes_per_s=x.bandwidth_bytes_per_s / 2)
                                          for x in machine.links))
    assert throughput_roofs(plan, program, halved)["disk"][0] == pytest.approx(roofs["disk"][0] / 2)


def test_experts_that_a_router_names_have_no_roofline(planned: Step, tmp_path: Path) -> None:
    plan, program, machine = planned
    routed = replace(plan, weights=(*plan.weights[:-1], replace(plan.weights[-1], tier="disk", pool_slots=1)))
    for given, drawn in ((plan, True), (routed, False)):
        draw_step(given, program, machine, tmp_path / "step.svg")
        text = (tmp_path / "step.svg").read_text()
        assert ("<!-- this plan -->" in text) == drawn and ("depends on its router" in text) != drawn


def test_an_ending_is_refused_before_the_work(tmp_path: Path) -> None:
    for name in ("a.png", "a.SVG", "a"):
        require_picture(tmp_path / name, "--picture")
    require_picture(None, "--picture")
    with pytest.raises(JobError, match=r"--picture: cannot write the picture .*a\.xyz; name a file .*\.png"):
        require_picture(tmp_path / "a.xyz", "--picture")
    with pytest.raises(JobError, match="is no folder"):
        require_picture(tmp_path / "none" / "a.png", "--picture")


def test_samples_of_memory_are_bounded_and_cover_the_run() -> None:
    watch = MemoryWatch(())
    for n in range(10 * watch.MOST_SAMPLES):
        watch._keep(n)
    kept = [nbytes for _, nbytes in watch.samples]
    assert watch.MOST_SAMPLES / 2 <= len(kept) < watch.MOST_SAMPLES
    gaps = {b - a for a, b in itertools.pairwise(kept)}
    assert kept[0] == 0 and len(gaps) == 1 and kept[-1] + max(gaps) >= 10 * watch.MOST_SAMPLES


def test_a_picture_of_a_run_has_measured_planned_and_budget(planned: Step, tmp_path: Path) -> None:
    plan, _, _ = planned
    watch = MemoryWatch(())
    watch.samples = [(0.0, 1 << 20), (1.0, 3 << 20)]
    draw_run(plan, watch, 1 << 20, tmp_path / "run.svg")
    drawn = (tmp_path / "run.svg").read_text()
    for label in ("measured", "budget, Python and threads", "weight", "slot", "cache"):
        assert f"<!-- {label} -->" in drawn
    with pytest.raises(PlanError, match="cannot write the picture"):
        draw_run(plan, watch, 0, tmp_path / "run.nonsense")
