"""A feature of batch schedules from outside the package: memory of its own, and a launch in each step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from forebay.api import wrap
from forebay.rewriter.ir.alignment import ALIGNMENT
from forebay.rewriter.ir.draft import Draft
from forebay.rewriter.ir.graph import Layout
from forebay.rewriter.ir.operator_names import called
from forebay.rewriter.ir.plan import Plan, PlanError, plan_from_dict
from forebay.rewriter.ir.program import COMPUTE, Launch, TensorRef, span_of
from forebay.rewriter.ir.schedule.batch_schedule import BatchSchedule
from forebay.rewriter.planning.features.feature import FeatureBuffer, ScheduleFeature, Trial
from forebay.rewriter.planning.features.table import FEATURES, register_feature

SHAPE: dict[str, Any] = {"batch": 3, "prompt": 10, "new_tokens": 8}
SETTING = "counter.nbytes"


def check_counter(plan: Plan) -> str:
    nbytes = plan.schedule.batching.extension(SETTING)
    return f"extensions: {SETTING}={nbytes} holds no counter of 8 bytes" if nbytes % 8 else ""


def try_counter(best: Plan, trial: Trial) -> Plan:
    """The plan that counts its steps, where there is room for it."""
    counted = trial.simulate(replace(best.schedule.batching, extensions=(f"{SETTING}=64",)))
    return best if counted is None else counted


def counter_buffers(batching: BatchSchedule, layout: Layout | None, host_hop: bool) -> Iterator[FeatureBuffer]:
    if batching.extension(SETTING):
        yield "counter", "io", "device", batching.extension(SETTING), ALIGNMENT


def count_step(draft: Draft, plan: Plan) -> None:
    """Add one to the counter at the end of each step."""
    for b in plan.buffers:
        if b.name == "counter":
            ref = TensorRef(b.arena, b.offset, "int64", (b.nbytes // 8,), (1,), b.name)
            draft.resident[b.name] = span_of(ref)
            draft.items.append(Launch(COMPUTE, called(torch.ops.aten.add_.Scalar), (ref, 1), {}, (), (span_of(ref),),
                                      (span_of(ref),), "count_step"))


COUNTER = ScheduleFeature(
    "counter",
    check=check_counter,
    buffers=counter_buffers,
    explain=lambda plan: ("counter", "steps are counted") if plan.schedule.batching.extension(SETTING) else None,
    improve=try_counter,
    step=count_step,
)


@pytest.fixture(autouse=True)
def features() -> Iterator[None]:
    before = [*FEATURES]
    register_feature(COUNTER)
    yield
    FEATURES[:] = before


def test_a_feature_from_outside_has_memory_and_a_launch_in_each_step(llama_checkpoint: Any) -> None:
    with wrap(llama_checkpoint.folder, llama_checkpoint.share(0.5), **SHAPE) as lm:
        assert lm.plan.schedule.batching.extensions == ("counter.nbytes=64",)
        assert "counter   steps are counted" in lm.explain()
        (buffer,) = (b for b in lm.plan.buffers if b.name == "counter")
        tokens = lm.generate(llama_checkpoint.ids, attention_mask=llama_checkpoint.mask, max_new_tokens=8,
                             do_sample=False, pad_token_id=0, eos_token_id=None)
        memory = lm.session.device.tensor(TensorRef("device", buffer.offset, "int64", (8,), (1,), "counter"))
        chunks = -(-SHAPE["prompt"] // lm.plan.schedule.prefill_chunk)
        assert memory.tolist() == [chunks + 7] * 8, "of each chunk, and of each token but the first"
        plan, size = lm.plan, lm.plan.prediction.peak_nbytes["device"]
    assert tokens.tolist() == llama_checkpoint.expected.tolist()
    assert size <= plan.budget.device
    again = plan_from_dict(json.loads(plan.to_json()))
    with wrap(llama_checkpoint.folder, llama_checkpoint.share(0.5), plan=again) as lm:
        assert lm.plan == plan


@pytest.mark.parametrize(("extensions", "said"), [
    (("counter.nbytes=12",), "extensions: counter.nbytes=12 holds no counter of 8 bytes"),
    (("clock.nbytes=8",), "'clock.nbytes=8' is of no feature that is registered"),
])
def test_settings_that_cannot_be_are_refused(llama_checkpoint: Any, extensions: tuple[str, ...], said: str) -> None:
    with wrap(llama_checkpoint.folder, llama_checkpoint.share(0.5), **SHAPE) as lm:
        plan = lm.plan
    batching = replace(plan.schedule.batching, extensions=extensions)
    edited = replace(plan, schedule=replace(plan.schedule, batching=batching))
    with pytest.raises(PlanError, match=said), wrap(
            llama_checkpoint.folder, llama_checkpoint.share(0.5), plan=edited) as lm:
        pass


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ValueError, match="there is a feature hidden already"):
        register_feature(replace(COUNTER, name="hidden"))
