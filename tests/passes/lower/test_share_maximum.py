"""A layer's range of scores reaches its launches of attention, in every cache format, and no others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from families import captured

from forebay.kernels.operators import find
from forebay.rewriter.capture.step_graphs import step_graphs
from forebay.rewriter.ir.plan import Budget, PlanError, Workload
from forebay.rewriter.ir.program import FileSlice, Launch, Program
from forebay.rewriter.ir.score_range import ScoreRange
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.options import Options
from forebay.rewriter.switches import Switches

WORK = Workload(batch=2, prompt=9, new_tokens=4)
RANGE = ScoreRange(1, 3.0, -40.0, 50.0)


def pipeline(cache: str) -> Pipeline:
    lm = rewrite_captured(captured("llama"), Switches(), cache)
    files = {spec.name: FileSlice("weights", i << 24, spec.nbytes) for i, spec in enumerate(lm.weights.values())}
    return Pipeline(step_graphs(lm, files, WORK, "llama"), WORK, Machine.default(), Switches())


def attending(program: Program) -> list[Launch]:
    found = [(item, find(item.op)) for item in program.step if isinstance(item, Launch)]
    return [item for item, operator in found if operator is not None and operator.score_ranges]


@pytest.mark.parametrize("cache", ("native", "kv4"))
def test_a_layers_range_is_behind_its_launches_arguments(cache: str) -> None:
    made = pipeline(cache)
    options = Options(cache=cache)
    budget = Budget(2 * made.smallest_budget(options))
    without = made.program(made.plan(budget, options), 1)
    program = made.program(made.plan(budget, replace(options, score_ranges=(RANGE,))), 1)
    assert len(attending(program)) > 1 and {launch.layer for launch in attending(program)} >= {0, 1}
    for launch, plain in zip(attending(program), attending(without), strict=True):
        arguments = find(launch.op).arguments  # type: ignore[union-attr]
        if launch.layer != 1:
            assert launch == plain
            continue
        assert launch.args == (*plain.args, 3.0, -40.0, 50.0)
        assert arguments[len(plain.args) : len(launch.args)] == ("phi", "low", "high")
    ours, others = ([i for i in p.step if not isinstance(i, Launch) or i not in attending(p)]
                    for p in (program, without))
    assert ours == others, "attention alone has ranges"


@pytest.mark.parametrize(("wrong", "field"), (
    (replace(RANGE, layer=99), "layer: the model has no layer 99"),
    (replace(RANGE, low=-61.0), "low: float32 holds exp of -60 to 60"),
    (replace(RANGE, high=61.0), "high: float32 holds exp of -60 to 60"),
))  # fmt: skip
def test_a_range_that_cannot_serve_is_refused_by_field(wrong: ScoreRange, field: str) -> None:
    made = pipeline("native")
    plan = made.plan(Budget(2 * made.smallest_budget()))
    with pytest.raises(PlanError, match=rf"^plan.score_ranges\[0\].{field}"):
        made.program(replace(plan, score_ranges=(wrong,)), 1)
