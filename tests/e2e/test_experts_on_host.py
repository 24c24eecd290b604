"""Experts that the host computes with beside a GPU, where they lie in its memory: the tokens of transformers on the
CUDA device over stand-ins for its driver, and a proof that catches each missing wait."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from e2e.test_gpu_blocks import Pretended, driver  # noqa: F401
from e2e.test_routed_on_gpu import GPU, NEW, PROMPT, logits, two_layers
from selection import at_length
from small_experts import Saved, saved_once

from forebay.api import wrap
from forebay.language_model import LanguageModel
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.ir.program import ATTEND, DOWNLOAD, HOST, RETURN, Copy, Launch, Program, Record, Wait, tier_of
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.planning.advice import advise
from forebay.rewriter.report.explain import explain_plan
from forebay.rewriter.verify.program import ProgramError, verify_program
from forebay.runtime.devices.cuda.memory import least_workspace_nbytes

pytestmark = pytest.mark.filterwarnings("ignore:OpenMP threads spin")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved_once(tmp_path_factory, two_layers, max_shard_size="150KB")


def wrapped(folder: Path, count: int | None, device: int = 480 << 10, batch: int = 2, **options: Any) -> LanguageModel:
    budget = {"device": device + least_workspace_nbytes(), "host": 1 << 24, "disk": folder}
    return wrap(folder, budget, batch=batch, prompt=PROMPT, new_tokens=NEW, cpu_experts=count,
                **{"machine": GPU} | options)


def on_host(lm: LanguageModel) -> int:
    return sum(w.on_host for w in lm.plan.weights)


def attended(program: Program) -> list[Launch]:
    return [i for i in program.step if isinstance(i, Launch) and i.stream == ATTEND]


@pytest.mark.parametrize(("family", "count", "options"), [
    ("qwen3_moe", 2, {}), ("qwen3_moe", 1, {"expert_slots": 5}), at_length("granitemoe", 2, {"device": 840 << 10}),
    at_length("qwen3_moe", 2, {"prefill_chunk": 1}),
    ("qwen3_moe", 2, {"cache_tier": "host", "cpu_attention": True, "micro_batches": 1, "prompt_lookup_num_tokens": 3})])
def test_same_logits_as_transformers(
    saved: Saved, driver: None, family: str, count: int, options: dict[str, Any]  # noqa: F811
) -> None:
    """Prompts stream the tables to the device; decode steps compute with them on the host, others come into pools."""
    folder, model = saved(family)
    with wrapped(folder, count, **options) as lm:
        assert isinstance(lm.session.device, Pretended) and on_host(lm) == count
        assert torch.allclose(logits(lm), logits(model), atol=1e-4)
        experts = [i for i in attended(lm.steps.program(1)) if "experts" in i.op]
        assert len(experts) == count and all(s.arena == HOST for i in experts for s in (*i.reads, *i.writes))


def test_packed_experts(saved: Saved, tmp_path: Path, driver: None) -> None:  # noqa: F811
    """The logits of tables that stream whole."""
    quantize_model(saved("qwen3_moe")[0], tmp_path / "w4", Wish("w4g32"))
    made = []
    for count in (0, 2):
        with wrapped(tmp_path / "w4", count, 150 << 10, expert_slots=0) as lm:
            assert on_host(lm) == count
            made.append(logits(lm))
    assert torch.allclose(*made, atol=1e-3)  # chunks of the prompt are others, which round otherwise


def test_no_wait_may_be_missing(saved: Saved) -> None:
    """Of those between the device, the copies of operands and results, and the host."""
    with wrapped(saved("qwen3_moe")[0], 2) as lm:
        program = lm.steps.program(1)
    events = {item.event for item in program.step if isinstance(item, Record) and item.stream in (
        ATTEND, RETURN, DOWNLOAD)}
    at = [i for i, item in enumerate(program.step) if isinstance(item, Wait) and (
        item.stream in (ATTEND, RETURN, DOWNLOAD) or item.event in events)]
    assert len(at) >= 2 * 3  # for each layer: its operands are there, its result, and the result's copy
    for i in at:
        with pytest.raises(ProgramError):
            verify_program(replace(program, step=program.step[:i] + program.step[i + 1 :]))


def test_only_operands_and_results_cross(saved: Saved) -> None:
    with wrapped(saved("qwen3_moe")[0], 2) as lm:
        program, plan = lm.steps.program(1), lm.plan
    crossing = [i for i in program.step if isinstance(i, Copy) and HOST in (tier_of(i.src), tier_of(i.dst))
                and not i.label.startswith("gather")]
    tokens, hidden, picks = 2, 64, 2
    assert sum(i.dst.nbytes for i in crossing if "experts" in i.label) == 2 * tokens * (2 * 4 * hidden + 12 * picks)
    assert not any("experts.table" in i.label for i in crossing)
    chunk = lm.steps.program(plan.schedule.prefill_chunk)
    assert any("experts.table" in i.label for i in chunk.step if isinstance(i, Copy)) and not attended(chunk)


def test_predicted_times_are_those_of_the_experts_named(saved: Saved) -> None:
    rate = 2e8
    gpu = replace(GPU, host_product_bytes_per_s={"float32": rate, "w4g64": 1.0})
    with wrapped(saved("qwen3_moe")[0], 2, machine=gpu) as lm:
        named, entry = 8 * (1 - (1 - 2 / 8) ** 2), 3 * 64 * 32 * 4
        assert lm.plan.prediction.busy_time_s[ATTEND] == pytest.approx(2 * named * entry / rate, rel=0.03)
        assert "the CPU computes those of 2 layers in decode steps" in explain_plan(lm.plan)
        assert "CPU-bound: reads of experts take 0 %" in "\n".join(advise(lm.plan))


@pytest.mark.parametrize(("rate", "chosen"), [(1e12, 1), (1e5, 0), (0.0, 0)])
def test_the_planner_chooses_by_time(saved: Saved, rate: float, chosen: int) -> None:
    """One table has room on the device. Where nobody measured the host it does not compute, unless it is asked to."""
    gpu = replace(GPU, host_product_bytes_per_s={"float32": rate} if rate else {})
    with wrapped(saved("qwen3_moe")[0], None, machine=gpu) as lm:
        assert on_host(lm) == chosen
    with wrapped(saved("qwen3_moe")[0], 0, machine=gpu) as lm:
        assert on_host(lm) == 0


@pytest.mark.parametrize(("count", "budget", "options", "message"), [
    (3, {}, {}, "cpu_experts=3"),
    (2, {"host": 0}, {}, "experts of 2 layers"),
    (1, {}, {"machine": Machine.default()}, "without a GPU the CPU computes all experts"),
    (1, {}, {"micro_batches": 2}, "cpu_experts=1")])
def test_what_cannot_be_is_refused(
    saved: Saved, count: int, budget: dict[str, int], options: dict[str, Any], message: str
) -> None:
    folder = saved("qwen3_moe")[0]
    given = {"device": (480 << 10) + least_workspace_nbytes(), "host": 1 << 24, "disk": folder} | budget
    with pytest.raises(PlanError, match=message):
        wrap(folder, given, batch=2, prompt=PROMPT, new_tokens=NEW, cpu_experts=count, **{"machine": GPU} | options)
