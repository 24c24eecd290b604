"""Routing as `calibrate --experts` measures it: the picks of transformers, and hits that plans then expect."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_experts import SMALL, Saved, saved_once, small

import forebay
from forebay.calibrate_experts import calibrate_experts, pool_hits
from forebay.calibration import Calibration, LayerRouting
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.ir.schedule.routed_fetch import hits_within
from forebay.rewriter.report.explain import explain_plan

pytestmark = pytest.mark.filterwarnings("ignore:OpenMP threads spin")
EXPERTS = SMALL["num_experts"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved_once(tmp_path_factory, small, max_shard_size="150KB")


def counted(model: Any, prompts: list[torch.Tensor]) -> list[list[int]]:
    """How many tokens pick each expert, layer by layer, in transformers."""
    counts = torch.zeros(SMALL["num_hidden_layers"], EXPERTS, dtype=torch.int64)
    with torch.no_grad():
        for prompt in prompts:
            for layer, logits in enumerate(model(prompt[None], output_router_logits=True).router_logits):
                picks = logits.topk(SMALL["num_experts_per_tok"]).indices
                counts[layer] += torch.bincount(picks.flatten(), minlength=EXPERTS)
    return counts.tolist()


def test_picks_are_those_of_transformers_and_plans_expect_their_hits(saved: Saved, tmp_path: Path) -> None:
    """Prompts of unequal length, in chunks that overlap: no token is counted twice."""
    folder, model = saved("qwen3_moe")
    draw = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 128, (n,), generator=draw) for n in (23, 9, 40)]
    found = calibrate_experts(folder, prompts, {"device": "900KiB", "host": 0, "disk": folder})
    assert [list(routing.counts) for routing in found.experts] == counted(model, prompts) and found.tokens == 72
    found.save(path := tmp_path / "experts.json")
    assert Calibration.load(path) == found and "busiest eighth" in found.table(torch.float32)
    with forebay.wrap(folder, {"device": "900KiB", "host": 0, "disk": folder}, prompt=4, new_tokens=4, expert_slots=3,
                      calibration=path) as lm:
        routed, text = lm.plan.schedule.routed, explain_plan(lm.plan)
        assert routed.measured == found.expert_hits and routed.hit_rate == hits_within(found.expert_hits, 3 / EXPERTS)
        assert f"measured: {100 * routed.hit_rate:.0f} % are there, on the prompts" in text and "the disk takes" in text
        wrong = replace(lm.plan, schedule=replace(lm.plan.schedule, routed=replace(routed, hit_rate=0.01)))
    with pytest.raises(PlanError, match=r"plan\.schedule\.routed\.hit_rate"):
        forebay.wrap(folder, {"device": "900KiB", "host": 0, "disk": folder}, plan=wrong)


def test_hits_rise_with_skew_and_with_slots() -> None:
    draw = torch.Generator().manual_seed(0)
    even, skewed = (torch.multinomial(torch.arange(1.0, 33) ** -power, 2400, True, generator=draw).view(-1, 1)
                    for power in (0.0, 1.0))
    names = torch.randperm(32, generator=draw)  # popular experts are neighbors in no model
    flat, steep = (pool_hits(names[picks], 32) for picks in (even, skewed))
    assert all(abs(hits - (i + 1) / 8) < 0.05 for i, hits in enumerate(flat))
    assert all(more > hits + 0.1 for more, hits in zip(steep[1:4], flat[1:4], strict=True))
    assert steep[-1] == flat[-1] == 1.0 and list(steep) == sorted(steep)
    assert hits_within(flat, 3 / 16) == pytest.approx((flat[0] + flat[1]) / 2) and hits_within((), 0.3) == 0.3
    assert hits_within(flat, 1.0) == 1.0 and hits_within(flat, 1 / 16) == pytest.approx(flat[0] / 2)


def test_what_is_no_routing_is_refused(tmp_path: Path, llama_checkpoint: Any) -> None:
    with pytest.raises(PlanError, match="the model has no experts"):
        calibrate_experts(llama_checkpoint.folder, [torch.tensor([1, 2])], {"device": "64MiB", "disk": tmp_path})
    with pytest.raises(ValueError, match="at least one tensor"):
        calibrate_experts(llama_checkpoint.folder, [], {"device": "64MiB", "disk": tmp_path})
    Calibration("f", 1, 1, (), (LayerRouting(0, (1, 2), (0.5, 0.2)),)).save(tmp_path / "bad.json")
    with pytest.raises(PlanError, match=r"calibration.experts\[0\].hits"):
        Calibration.load(tmp_path / "bad.json")
