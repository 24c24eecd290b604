"""Plans that nobody checked are refused where their Program is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from forebay.rewriter.ir.plan import Plan, PlanError


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
