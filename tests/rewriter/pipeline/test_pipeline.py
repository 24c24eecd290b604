"""Plans that nobody checked are refused where their Program is made; what a plan is made from holds for all steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import transformers
from packaging.version import Version

from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.capture.step_graphs import step_graphs
from forebay.rewriter.ir.plan import Plan, PlanError, Workload
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.pipeline.step_pipeline import Pipeline
from forebay.rewriter.planning.graph_needs import weight_uses
from forebay.rewriter.switches import Switches


def without_an_activation(plan: Plan) -> Plan:
    (gone, *_) = [b for b in plan.buffers_of("decode") if b.kind == "activation"]
    return replace(plan, buffers=tuple(b for b in plan.buffers if b != gone))


def without_a_cache(plan: Plan) -> Plan:
    (gone, *_) = [b for b in plan.buffers if b.kind == "cache"]
    return replace(plan, buffers=tuple(b for b in plan.buffers if b != gone))


def without_slots(plan: Plan) -> Plan:
    return replace(plan, buffers=tuple(b for b in plan.buffers if b.kind != "slot"))


@pytest.mark.parametrize(("edit", "message"), [
    (without_an_activation, r"allocate_buffers finds no buffer .*; plan again"),
    (without_a_cache, r"the plan does not fit the model's graph \(KeyError: 'cache_k_0'\); plan again"),
    (without_slots, r"the plan does not fit the model's graph \(IndexError: .*\); plan again")])
def test_an_edited_plan_is_told_as_one(llama_checkpoint: Any, edit: Callable[[Plan], Plan], message: str) -> None:
    with llama_checkpoint.language_model(0.8, prefill_chunk=1) as lm, pytest.raises(PlanError, match=message):
        lm.steps.pipeline.program(edit(lm.plan), 1)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="mixers are written in another way")
def test_weights_stream_in_tiles_where_every_step_can_read_tiles() -> None:
    """The operand of Zamba's last product lies in rows in steps over one token alone."""
    config = transformers.ZambaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2,
        layers_block_type=["mamba", "hybrid"] * 2, n_mamba_heads=2, mamba_d_state=4)
    captured, work = rewrite_captured(capture_model(config), Switches()), Workload(2, 5, 3)
    files = {spec.name: FileSlice("weights", i << 24, spec.nbytes) for i, spec in enumerate(captured.weights.values())}
    pipeline = Pipeline(step_graphs(captured, files, work, "zamba"), work, Machine.default(), Switches())
    one, several = ({use.name for use in weight_uses(pipeline.graphs.step(tokens), set()) if use.tileable}
                    for tokens in (1, 5))
    assert one - several and {use.name for use in pipeline.needs.uses if use.tileable} == one & several
