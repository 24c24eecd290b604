"""Gemma 3n and Gemma 4, whose last layers attend over keys and values of earlier ones: the tokens of a full forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from prompted_experts import smallest
from selection import at_length, without
from transformers import AutoConfig, AutoModelForCausalLM

import forebay
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.ir.plan import PlanError

pytestmark = [pytest.mark.filterwarnings("ignore:.*lies in memory"),
              pytest.mark.filterwarnings("ignore:OpenMP threads spin")]
COMMON: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=4, vocab_size=128, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=64,
    sliding_window=6, layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
    hidden_size_per_layer_input=16, vocab_size_per_layer_input=128)
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3n_text": dict(laurel_rank=8, activation_sparsity_pattern=[0.9, 0.0, 0.5, 0.0]),
    "gemma4_text": dict(global_head_dim=32),
}
PROMPT, NEW, LENGTHS = 11, 4, (11, 6, 1, 4)


def small(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **COMMON | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize("family", without(FAMILIES, ["gemma3n_text"]))
def test_keys_and_values_are_kept_once(family: str) -> None:
    captured = capture_model(AutoConfig.for_model(family, **COMMON | FAMILIES[family]))
    assert [[spec.kind for spec in states] for states in captured.states] == [["kv of several layers"]] * 2 + [[]] * 2
    calls = captured.step.graph.find_nodes(op="call_module", target=captured.layers[2])
    read = {node.name for node in calls[0].all_input_nodes if node.name.startswith("cache_")}
    assert read == {"cache_k_0", "cache_v_0"}


@pytest.mark.parametrize(("family", "batch", "options"), [
    ("gemma3n_text", 3, dict(prefill_chunk=4)), at_length("gemma3n_text", 1, {}),
    at_length("gemma3n_text", 4, dict(micro_batches=2)), at_length("gemma3n_text", 2, dict(prompt_lookup_num_tokens=4)),
    at_length("gemma4_text", 4, dict(prompt_lookup_num_tokens=4)), at_length("gemma4_text", 1, {}),
    at_length("gemma4_text", 3, dict(prefill_chunk=4)), at_length("gemma4_text", 4, dict(micro_batches=2))])
def test_tokens_are_those_of_a_full_forward(tmp_path: Path, family: str, batch: int, options: dict[str, Any]) -> None:
    model = small(family)
    model.save_pretrained(tmp_path)
    ids = torch.randint(3, 128, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(PROMPT) >= PROMPT - torch.tensor(LENGTHS[:batch])[:, None]).long()
    want = []
    for row, length in zip(ids, LENGTHS, strict=False):
        seen = row[PROMPT - length :]
        with torch.no_grad():
            for _ in range(NEW):
                seen = torch.cat((seen, model(input_ids=seen[None], use_cache=False).logits[0, -1:].argmax(-1)))
        want.append(seen[-NEW:])
    budgets = [smallest(tmp_path) + (128 << 10)] if options else [smallest(tmp_path), 8 << 20]
    for budget in budgets:
        with forebay.wrap(tmp_path, {"device": budget, "disk": tmp_path}, batch=batch, prompt=PROMPT, new_tokens=NEW,
                          **options) as lm:
            found = lm.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        assert torch.equal(found[:, PROMPT:], torch.stack(want)), budget


@pytest.mark.parametrize(("options", "message"), [
    (dict(cache_tier="disk"), "layer 0 keeps a state of kind kv of several layers, which is not pageable"),
    at_length(dict(cache="kv8"), "several layers read the keys and values of one; keep it native"),
    at_length(dict(batch_slots=2), "copies for sequences that are admitted are made layer by layer"),
])
def test_what_shared_keys_and_values_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        forebay.wrap(small("gemma4_text"), {"device": 4 << 20}, batch=4, prompt=PROMPT, new_tokens=NEW, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bundle_gives_the_same(tmp_path: Path, family: str) -> None:
    """Gemma 3n writes into parts of its hidden states [4, B, S, H]; a bundle holds no operator that writes."""
    model = small(family)
    model.save_pretrained(tmp_path / "model")
    ids = torch.randint(3, 128, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    found = []
    forebay.export(tmp_path / "model", tmp_path / "bundle", budget="8MiB", batch=2, prompt=PROMPT, new_tokens=NEW)
    for folder in ("model", "bundle"):
        with forebay.wrap(tmp_path / folder, "8MiB", batch=2, prompt=PROMPT, new_tokens=NEW) as lm:
            found.append(lm.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None))
    assert torch.equal(*found)
