"""Attention among the tokens that an indexer chooses (DeepSeek-V3.2): the tokens of transformers, in contexts of more
tokens than it chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.test_latent import MORE, NEW, PROMPT, SMALL, rounded, tokens
from selection import at_length
from small_experts import Saved, random_model, saved_once

import forebay
from forebay.kernels.operators import CHOOSE_TOKENS
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.ir.indexers import least_chosen
from forebay.rewriter.ir.plan import PlanError
from forebay.rewriter.ir.program import Launch

pytestmark = [pytest.mark.filterwarnings("ignore:.*lies in memory"),
              pytest.mark.filterwarnings("ignore:OpenMP threads spin")]
CHOSEN = 5  # of up to 13 tokens
STAGED: dict[str, Any] = {"cache_tokens": 4, "micro_batches": 3}
INDEXED: dict[str, Any] = dict(index_topk=CHOSEN, index_head_dim=16, index_n_heads=12)
OTHERS: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": dict(indexer_types=["full", "full"]), "hy_v4": dict(indexer_types=["full", "full"])}


def small(family: str) -> Any:
    from transformers import CONFIG_MAPPING

    return random_model(CONFIG_MAPPING[family](**SMALL | MORE.get(family, {}) | INDEXED | OTHERS.get(family, {})))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saved_once(tmp_path_factory, small)


def opened(folder: Path, device: str = "2MiB", **options: Any) -> Any:
    sizes: dict[str, Any] = dict(batch=3, prompt=PROMPT, new_tokens=NEW)
    return forebay.wrap(folder, {"device": device, "host": "2MiB", "disk": folder}, **sizes | options)


@pytest.mark.parametrize("family", ["deepseek_v32", at_length("glm_moe_dsa"), at_length("hy_v4")])
def test_same_tokens_as_transformers(saved: Saved, family: str) -> None:
    folder, model = saved(family)
    want = tokens(model)
    for budget in ("2MiB", "450KiB"):
        with opened(folder, budget) as lm:
            assert torch.equal(tokens(lm), want), budget
            assert (lm.plan.prediction.streamed_nbytes > 0) == (budget != "2MiB")
            called = {item.op for item in lm.steps.program(1).step if isinstance(item, Launch)}
            assert CHOOSE_TOKENS.name in called


@pytest.mark.parametrize("options", [
    {"prefill_chunk": 3}, {"batch_slots": 2, "prompt_lookup_num_tokens": 3}, {"cache_tier": "disk", **STAGED},
    at_length({"cache_tier": "host", "order": "row", **STAGED}), at_length({"policy": (50, 0, 40, 30, 100, 0)}),
    at_length({"prefix_cache": "1MiB"}), at_length({"draft": "w8"})], ids=str)
def test_it_composes(saved: Saved, options: dict[str, Any]) -> None:
    folder, model = saved("deepseek_v32")
    with opened(folder, **options) as lm:
        assert torch.equal(tokens(lm), tokens(model))


def test_beams_and_longer_calls(saved: Saved) -> None:
    """Beams move index keys too; a call that is longer than planned plans for an indexer."""
    folder, model = saved("deepseek_v32")
    with opened(folder, batch=6) as lm:
        assert torch.equal(tokens(lm, num_beams=2), tokens(model, num_beams=2))
    with opened(folder, prompt=2, new_tokens=CHOSEN - 2) as lm:
        assert torch.equal(tokens(lm), tokens(model))


@pytest.mark.parametrize("bits", [8, at_length(4)])
def test_packed_rows(saved: Saved, bits: int) -> None:
    folder, _ = saved("deepseek_v32")
    with opened(folder, cache=f"kv{bits}") as lm:
        assert torch.equal(tokens(lm), tokens(rounded(small("deepseek_v32"), bits)))


def test_a_bundle(saved: Saved, tmp_path: Path) -> None:
    folder, model = saved("deepseek_v32")
    forebay.export(folder, tmp_path / "bundle", "bundle", budget="1MiB")
    ids = torch.randint(3, 128, (1, 2), generator=torch.Generator().manual_seed(2))
    with opened(tmp_path / "bundle") as lm:
        assert torch.equal(tokens(lm), tokens(model))
    with opened(tmp_path / "bundle", batch=1, prompt=2, new_tokens=3) as lm:
        assert torch.equal(lm.generate(ids, max_new_tokens=3, do_sample=False),
                           model.generate(ids, max_new_tokens=3, do_sample=False))


def test_short_contexts_have_no_indexer(saved: Saved) -> None:
    """Neither its weights nor its keys are kept where it would choose all tokens."""
    folder, model = saved("deepseek_v32")
    of_indexer = sum(p.nbytes for name, p in model.named_parameters() if ".indexer." in name)
    planned = {}
    for new in (CHOSEN - 2, CHOSEN - 1):
        with opened(folder, batch=1, prompt=2, new_tokens=new) as lm:
            names = {b.name for b in lm.plan.buffers}
            planned[new] = sum(b.nbytes for b in lm.plan.buffers if b.kind == "weight")
            assert any("indexer" in name for name in names) is any("index_keys" in name for name in names) is (
                new == CHOSEN - 1)
    assert planned[CHOSEN - 1] - planned[CHOSEN - 2] >= of_indexer


def test_what_cannot_be_is_refused_before_it_runs(saved: Saved) -> None:
    folder, _ = saved("deepseek_v32")
    with pytest.raises(PlanError, match=r"^batch_slots .* some states move in no blocks"):
        opened(folder, cache_tier="disk", batch_slots=2)
    with pytest.raises(PlanError, match=f"a GPU has no kernel for this model's indexer, .* at most {CHOSEN} together"):
        opened(folder, machine="rtx4090")


def test_layers_that_share_a_choice_have_short_contexts() -> None:
    """As many tokens as an indexer chooses: then it chooses all, and none is asked."""
    from transformers import GlmMoeDsaConfig

    captured = capture_model(GlmMoeDsaConfig(**SMALL | MORE["glm_moe_dsa"] | INDEXED))
    assert captured.max_positions == CHOSEN and not least_chosen(captured.step)
