"""FlexGen's policy: six percentages say where weights, KV cache and hidden states lie, and tokens stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

import forebay
from forebay.rewriter.ir.plan import PlanError, load_plan
from forebay.rewriter.planning.options import Options
from forebay.rewriter.planning.policy import placed_by
from forebay.rewriter.planning.step_streams import SMALL_NBYTES

SIZES: dict[str, Any] = {"batch": 4, "prompt": 6, "new_tokens": 4}
PLACED = {  # tiers of the cache and of hidden states
    (100, 0, 100, 0, 100, 0): ("device", "device"), (20, 80, 0, 100, 0, 100): ("host", "host"),
    (30, 20, 50, 20, 50, 25): ("disk", "disk"), (0, 0, 0, 0, 0, 0): ("disk", "disk"),
    (50, 0, 0, 100, 100, 0): ("host", "device")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """A folder, prompts and transformers' answers."""
    torch.manual_seed(0)
    config = OPTConfig(vocab_size=200, hidden_size=128, num_hidden_layers=4, ffn_dim=512, num_attention_heads=4,
                       word_embed_proj_dim=128, max_position_embeddings=64)  # weights large enough to stream
    folder, eager = tmp_path_factory.mktemp("opt"), OPTForCausalLM(config).eval()
    eager.save_pretrained(folder)
    ids = torch.randint(3, 190, (4, 6))
    return folder, ids, eager.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("policy", PLACED)
def test_things_lie_where_the_policy_has_them(model: Any, policy: tuple[int, ...], tmp_path: Path) -> None:
    folder, ids, expected = model
    budget = {"device": "8MiB", "host": "8MiB", "disk": tmp_path}
    with forebay.wrap(folder, budget, micro_batches=4, policy=policy, **SIZES) as lm:
        weights, batching = lm.plan.weights, lm.plan.schedule.batching
        assert (batching.cache.tier, batching.hidden.tier) == PLACED[policy]
        caches = 4 * batching.micro_batches.count
        if batching.cache.tier == "disk":
            assert [batching.cache.on_device, batching.cache.on_host] == [caches * n // 100 for n in policy[2:4]]
        streamed = [w for w in weights if w.nbytes >= SMALL_NBYTES]
        whole, largest = sum(w.nbytes for w in streamed), max(w.nbytes for w in streamed)
        for share, tier in zip(policy, ("device", "host"), strict=False):
            held = sum(w.nbytes for w in streamed if w.tier == tier)
            assert held <= share / 100 * whole + 4096 * len(streamed)
            assert held >= share / 100 * whole - 2 * largest
        lm.plan.save(tmp_path / "plan.json")
        assert torch.equal(lm.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False), expected)
    with forebay.wrap(folder, budget, plan=tmp_path / "plan.json", **SIZES) as lm:
        assert lm.plan == load_plan(tmp_path / "plan.json")
    for asked in ({"policy": policy}, {"weight_shares": (0.5, 0.5)}):
        with pytest.raises(PlanError, match="the plan has places of its own"):
            forebay.wrap(folder, budget, plan=tmp_path / "plan.json", **asked, **SIZES)


@pytest.mark.parametrize(("policy", "why"), [
    ("half", "policy must be six percentages"), ((1, 2), "policy must be six percentages"),
    ((0, 0, 0, 0, 0, 101), "policy must be six"), ((0, 0, 0, True, 0, 0), "policy must be six"),
    ((60, 50, 0, 0, 0, 0), "policy has more than 100 % of the weights"),
    ((0, 0, 0, 0, 99, 2), "policy has more than 100 % of the hidden states")])
def test_what_is_no_policy_is_refused(policy: Any, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        Options(policy=policy)


def test_a_policy_leaves_nothing_else_to_say() -> None:
    with pytest.raises(PlanError, match="leave out cache_tier"):
        Options(policy=(0, 0, 0, 100, 0, 0), cache_tier="disk")
    with pytest.raises(PlanError, match=r"weight_shares: \(0.7, 0.7\) must be shares of one whole"):
        forebay.wrap("demo", "80MiB", weight_shares=(0.7, 0.7))
    assert placed_by(None) == {}
    assert placed_by((10, 90, 25, 75, 0, 40)) == {
        "weight_shares": (0.1, 0.9), "cache_tier": "host", "cache_shares": (0.25, 0.0), "hidden_tier": "disk",
        "hidden_shares": (0.0, 0.4)}


@pytest.mark.parametrize(("budget", "why"), [
    ({"device": "8MiB"}, r"budget.host: 0 B cannot hold the 80% of the weights; give more, or name a smaller share"),
    ({"device": "8MiB", "host": "64KiB"}, r"budget.host: 64.0 KiB cannot hold the 80% of the weights"),
    ({"device": "900KiB", "host": "8MiB"}, r"weight_shares=\(0.2, 0.8\) cannot work within a device budget of")])
def test_a_budget_that_the_shares_do_not_fit_is_refused(model: Any, budget: dict[str, str], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        forebay.wrap(model[0], budget, weight_shares=(0.2, 0.8), **SIZES)
