"""Decoding with a cache that took over the prefill's activation memory: same tokens, again and again, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.agreement import assert_same_tokens

from forebay.language_model import LanguageModel
from forebay.rewriter.ir.meeting import meeting_of
from forebay.rewriter.ir.plan import Budget, Plan, PlanError, Workload, load_plan
from forebay.rewriter.ir.program import Launch, span_of
from forebay.rewriter.planning.options import Options
from forebay.runtime.devices.device import RuntimeFault
from forebay.runtime.run.generation import Stop, generate_tokens, next_logits
from forebay.runtime.run.sampling import Sampling

BATCH, PROMPT, NEW = 3, 10, 8


def lending(checkpoint: Any, budget: float = 0.8, **options: Any) -> LanguageModel:
    lm = checkpoint.language_model(budget, **dict(prefill_chunk=PROMPT) | options)
    assert lm.plan.prefill_overlays_kv_cache
    return lm


def check(lm: LanguageModel, checkpoint: Any) -> None:
    got = lm.generate(checkpoint.ids, attention_mask=checkpoint.mask, max_new_tokens=NEW, eos_token_id=None)
    assert_same_tokens(got, checkpoint.expected, checkpoint.mask, checkpoint.model, lm.next_logits)


def overlap(plan: Plan) -> int:
    """Bytes that are a prefill's activation first and cache later."""
    base = min(b.offset for b in plan.buffers if b.phase == "prefill" and b.kind != "cache")
    return max(b.offset + b.nbytes for b in plan.buffers_of("decode") if b.kind == "cache") - base


@pytest.mark.parametrize(("name", "chunk", "poison"), [
    ("llama_checkpoint", PROMPT, "0"), ("llama_checkpoint", 4, "1"), ("tied_checkpoint", PROMPT, "1"),
    ("tied_checkpoint", 4, "0")])
def test_the_same_tokens_again_and_again(
    name: str, chunk: int, poison: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Poison makes NaN of what activations leave behind, where the cache then grows."""
    monkeypatch.setenv("FOREBAY_POISON", poison)
    checkpoint = request.getfixturevalue(name)
    with lending(checkpoint, prefill_chunk=chunk) as lm:
        assert overlap(lm.plan) > 0 and lm.plan.prediction.streamed_nbytes > 0
        for _ in range(2):
            check(lm, checkpoint)
        row, mask = checkpoint.ids[1:2], checkpoint.mask[1:2]
        alone = lm.generate(row, attention_mask=mask, max_new_tokens=NEW, eos_token_id=None)
        assert torch.equal(alone, checkpoint.expected[1:2]), "three tokens, in the chunk that is planned"


def test_every_cached_token_is_moved_and_the_rest_is_zero(llama_checkpoint: Any) -> None:
    with lending(llama_checkpoint) as lm:
        prompts = list(llama_checkpoint.ids)
        next_logits(lm.session, prompts)
        spec, context = lm.captured.states[0][0], lm.plan.workload.context
        tensor = lm.session.device.tensor
        step, growth = lm.steps.program(PROMPT), lm.steps.pipeline.growth(lm.plan)
        assert growth is not None
        appended = {ref.buffer: ref for item in step.step if isinstance(item, Launch) and item.op == "forebay.kv_append"
                    for ref in item.args[:2]}
        assert all(ref.shape == (BATCH, spec.kv_heads, PROMPT, spec.head_dim) for ref in appended.values())
        before = {name: tensor(ref).flatten(0, 1).clone() for name, ref in appended.items()}
        lm.session.grow()
        assert growth.outputs.keys() == before.keys() and len(before) == 2 * len(lm.captured.states)
        for name, ref in growth.outputs.items():
            held = tensor(ref)
            assert held.shape[1] == context and span_of(ref).nbytes == held.numel() * 4
            assert torch.equal(held[:, :PROMPT], before[name]) and held[:, :PROMPT].abs().sum() > 0
            assert not held[:, PROMPT:].any()


def test_it_runs_in_less_than_was_the_least_before(llama_checkpoint: Any) -> None:
    """The smallest budget is that of one arena for both phases; a byte less is refused, and it still is right."""
    captured, checkpoint, files = llama_checkpoint.opened
    workload, options = Workload(BATCH, PROMPT, NEW), Options(prefill_chunk=PROMPT)
    with LanguageModel(captured, checkpoint, files, Budget(1 << 30), workload, options) as lm:
        smallest = lm.steps.pipeline.smallest_budget(options)
        lm.steps.pipeline.needs = replace(lm.steps.pipeline.needs, cache_prompt={})
        apart = lm.steps.pipeline.smallest_budget(options)
    assert smallest < apart
    with pytest.raises(PlanError, match=rf"prefill_chunk={PROMPT} .* needs .* \({smallest} bytes\)"):
        LanguageModel(captured, checkpoint, files, Budget(smallest - 1), workload, options)
    with LanguageModel(captured, checkpoint, files, Budget(smallest), workload, options) as lm:
        assert lm.plan.prefill_overlays_kv_cache
        check(lm, llama_checkpoint)


def test_a_saved_plan_lends_as_before(llama_checkpoint: Any, tmp_path: Path) -> None:
    with lending(llama_checkpoint) as lm:
        lm.plan.save(tmp_path / "plan.json")
    plan = load_plan(tmp_path / "plan.json")
    with LanguageModel(*llama_checkpoint.opened, plan.budget, plan.workload, Options(), plan=plan) as again:
        assert again.plan.prefill_overlays_kv_cache
        check(again, llama_checkpoint)


def test_an_edited_plan_whose_cache_cannot_grow_is_refused(llama_checkpoint: Any) -> None:
    """Of a cache that decodes from the other end its last layer would have to move down."""
    with lending(llama_checkpoint) as lm:
        plan = lm.plan
    batch_slots = [b.offset for b in plan.buffers if b.kind == "cache" and b.phase == "decode"]
    turned = {old: new for old, new in zip(sorted(batch_slots), sorted(batch_slots, reverse=True), strict=True)}
    edited = replace(plan, buffers=tuple(
        replace(b, offset=turned[b.offset]) if b.kind == "cache" and b.phase == "decode" else b for b in plan.buffers))
    with pytest.raises(PlanError, match=r"cache_\w+ lies higher during prefill than later; a cache only moves up"):
        LanguageModel(*llama_checkpoint.opened, plan.budget, plan.workload, Options(), plan=edited)
    with lending(llama_checkpoint) as lm, pytest.raises(PlanError, match=r"cache cannot grow .*moves up; plan again"):
        lm.steps.pipeline.growth(edited)


def test_one_token_at_a_time_borrows_nothing(llama_checkpoint: Any) -> None:
    with llama_checkpoint.language_model(0.8, prefill_chunk=1) as lm:
        assert not lm.plan.prefill_overlays_kv_cache and lm.steps.pipeline.growth(lm.plan) is None
        check(lm, llama_checkpoint)


@pytest.mark.parametrize(("count", "new"), [(3, NEW + 2), (4, 1)])
def test_what_would_cross_is_refused_before_it_starts(llama_checkpoint: Any, count: int, new: int) -> None:
    with lending(llama_checkpoint) as lm:
        meeting = meeting_of(lm.plan)
        assert meeting is not None and meeting.tokens >= lm.plan.workload.context
        prompts = [llama_checkpoint.ids[i % 3] for i in range(count)]
        with pytest.raises(RuntimeFault, match=rf"begin at byte {meeting.activation_base}, .*meet at {meeting.tokens}"):
            generate_tokens(lm.session, prompts, Sampling(), Stop(new))
        assert not lm.session._started, "no step was run"
        check(lm, llama_checkpoint)
