"""FOREBAY_BISECT passes on sound pipelines and names the first pass that changes a result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import aten, chain, flat_graph, planned
from torch import fx

import forebay.rewriter.pipeline as pipeline
from forebay.rewriter.ir.plan import Budget, Plan
from forebay.rewriter.switches import Switches
from forebay.rewriter.verify.bisect import Bisection, PassChangedResult

SMALL = Budget(30_000)


def drop_last_relu(gm: fx.GraphModule, plan: Plan) -> None:
    last = [n for n in gm.graph.nodes if n.target is aten.relu.default][-1]
    last.replace_all_uses_with(last.args[0])
    gm.graph.erase_node(last)


@pytest.mark.parametrize("broken", ["insert_transfers", "select_gemm", "allocate_buffers"])
def test_names_the_pass_that_breaks_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    passes = []
    for run_pass, reason in pipeline.PASSES:
        def run(gm: fx.GraphModule, plan: Plan, run_pass=run_pass) -> None:
            run_pass(gm, plan)
            if run_pass.__name__ == broken:
                drop_last_relu(gm, plan)

        run.__name__ = run_pass.__name__
        passes.append((run, reason))
    monkeypatch.setattr(pipeline, "PASSES", tuple(passes))
    model = chain(tmp_path, width=64)
    with pytest.raises(PassChangedResult, match=rf"{broken} is the first pass .* output 0 differs by"):
        planned(model, SMALL, switches=Switches(bisect=True))


def test_a_sound_pipeline_passes(tmp_path: Path) -> None:
    plan, _ = planned(chain(tmp_path, width=64), SMALL, switches=Switches(bisect=True))
    assert plan.prediction.streamed_nbytes > 0, "there were transfers to compare"


def graph(factor: float, dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    return flat_graph(lambda g, n: (g.call_function(aten.mul.Tensor, (n["x"], factor)),),
                      {"x": torch.ones(8, 8, dtype=dtype)}, {})


@pytest.mark.parametrize(("dtype", "within", "beyond"), [(torch.float32, 2.00001, 2.001), (torch.bfloat16, 2.01, 2.2)])
def test_rounding_is_allowed_and_more_is_not(dtype: torch.dtype, within: float, beyond: float) -> None:
    bisection = Bisection(graph(2.0, dtype))
    bisection.compare(graph(within, dtype), "close")
    with pytest.raises(PassChangedResult, match="far"):
        bisection.compare(graph(beyond, dtype), "far")


def test_a_nan_is_a_change() -> None:
    with pytest.raises(PassChangedResult):
        Bisection(graph(2.0)).compare(graph(float("nan")), "nan")


def test_writes_into_inputs_do_not_leak_into_the_next_comparison() -> None:
    def build(g: fx.Graph, n: dict[str, fx.Node]) -> object:
        kept = g.call_function(aten.clone.default, (n["x"],))
        g.call_function(aten.mul_.Tensor, (n["x"], 3.0))
        return (kept,)

    gm = flat_graph(build, {"x": torch.ones(4)}, {})
    bisection = Bisection(gm)
    bisection.compare(gm, "same")
    bisection.compare(gm, "same again")
