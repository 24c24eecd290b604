"""Mixtures of experts: the tokens of transformers at any budget, from checkpoints as they lie on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from prompted_experts import NEW, PROMPT, prompts, smallest, tokens
from safetensors.torch import load_file, save_file
from selection import ALL, at_length
from small_experts import Saved, saved_once, small

import forebay
from forebay.exported.errors import ExportError
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.ir.plan import PlanError

pytestmark = [pytest.mark.filterwarnings("ignore:.*lies in memory"),
              pytest.mark.filterwarnings("ignore:OpenMP threads spin")]
# Per-expert tensors; all experts of a layer in one tensor; groups of experts, shared ones beside, a dense first layer;
# matrices that are transposed, and weights that scale what experts are given, or sinks of attention, biases, gates and
# values in turn; rows of all experts in one matrix, of which the second alone is transposed; queries by experts too.
FAMILIES = ["qwen3_moe", "glm4_moe", "llama4_text", "gpt_oss", "dbrx", "jetmoe", *map(at_length, (
    "granitemoe", "mixtral", "qwen2_moe", "olmoe", "dots1", "minimax_m2", "granitemoeshared", "flex_olmo",
    "ernie4_5_moe", "cohere2_moe", "hunyuan_v1_moe", "phimoe"))]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A family's model in a folder of several files, and in memory."""
    return saved_once(tmp_path_factory, small, max_shard_size="150KB")




@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_as_transformers_at_any_budget(saved: Saved, family: str) -> None:
    folder, model = saved(family)
    ids, mask = prompts()
    want, least = tokens(model, ids, mask), smallest(folder)
    nbytes = sum(p.numel() * 4 for p in model.parameters())
    rows = set()
    for budget in (least, *([(least + nbytes) // 2] if ALL or family == FAMILIES[0] else []), 4 * nbytes):
        lm = forebay.wrap(folder, {"device": budget, "disk": folder}, batch=3, prompt=PROMPT, new_tokens=NEW)
        assert torch.equal(tokens(lm, ids, mask), want), budget
        tables = [w for w in lm.plan.weights if w.name.endswith(".table")]
        rows.add(tables[0].tile_rows if tables[0].tier == "disk" else -1)
        lm.close()
    assert len(rows) > 1 and tables  # experts a few at a time, and in memory


@pytest.mark.parametrize("options", [
    {"prefill_chunk": 2}, {"prompt_lookup_num_tokens": 3}, {"cache": "kv8"}, {"batch_slots": 2},
    {"batch": 4, "micro_batches": 2, "cache_tier": "disk"},
], ids=lambda options: " ".join(options))
def test_it_composes(saved: Saved, options: dict[str, Any]) -> None:
    folder, model = saved("qwen3_moe")
    ids, mask = prompts()
    sizes = {} if {"batch", "batch_slots"} & options.keys() else {"batch": 3}
    budget = {"device": "700KiB", "host": 0, "disk": folder}
    lm = forebay.wrap(folder, budget, prompt=PROMPT, new_tokens=NEW, **sizes, **options)
    assert torch.equal(tokens(lm, ids, mask), tokens(model, ids, mask))
    lm.close()


@pytest.mark.all
def test_a_model_in_memory_and_a_bundle(saved: Saved, tmp_path: Path) -> None:
    folder, model = saved("granitemoe")
    ids, mask = prompts()
    want, budget = tokens(model, ids, mask), {"device": smallest(folder) + 100_000, "disk": tmp_path}
    own = small("granitemoe")
    lm = forebay.wrap(own, budget, batch=3, prompt=PROMPT, new_tokens=NEW)
    assert torch.equal(tokens(lm, ids, mask), want)
    lm.close()
    for source in (folder, small("granitemoe")):
        out = tmp_path / f"bundle{source is folder}"
        forebay.export(source, out, "bundle", budget=budget)
        lm = forebay.wrap(out, budget, batch=3, prompt=PROMPT, new_tokens=NEW)
        assert torch.equal(tokens(lm, ids, mask), want)
        lm.close()


@pytest.mark.all
def test_bf16_stays_near(tmp_path: Path) -> None:
    model = small("qwen3_moe", torch.bfloat16)
    model.save_pretrained(tmp_path)
    ids, _ = prompts()
    with torch.no_grad():
        want = model(ids).logits.float()
    for budget in (smallest(tmp_path), 10 << 20):
        lm = forebay.wrap(tmp_path, {"device": budget, "disk": tmp_path}, batch=3, prompt=PROMPT, new_tokens=NEW)
        found = lm(ids).logits.float()
        assert (found - want).norm() < 0.03 * want.norm()
        lm.close()


def test_a_wrong_expert_is_seen(saved: Saved, tmp_path: Path) -> None:
    """Two experts of one layer that have changed slots change tokens: the test of tokens would see it."""
    _, model = saved("qwen3_moe")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    one, other = ([name for name in weights if f"layers.1.mlp.experts.{i}." in name] for i in (2, 5))
    swapped = {**weights, **{a: weights[b] for a, b in zip(one + other, other + one, strict=True)}}
    save_file(swapped, tmp_path / "model.safetensors", {"format": "pt"})
    lm = forebay.wrap(tmp_path, {"device": "1GiB", "disk": tmp_path}, batch=3, prompt=PROMPT, new_tokens=NEW)
    ids, _ = prompts()
    with torch.no_grad():
        assert (lm.next_logits(ids) - model(ids).logits[:, -1]).norm() > 1e-3
    lm.close()


@pytest.mark.parametrize(("what", "message"), [
    ("missing", "holds only a part of expert 3"), ("shape", "which is no part of"), ("dtype", "float16"),
    ("more", "has 96 rows, not 64"), ("twice", "are one weight to the model, and their values differ")])
def test_odd_checkpoints_are_refused(saved: Saved, tmp_path: Path, what: str, message: str) -> None:
    _, model = saved("qwen3_moe")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    if what == "missing":
        del weights[name]
    elif what == "twice":
        weights[name.removeprefix("model.")] = weights[name] + 1
    else:
        weights[name] = {"shape": weights[name][:, 1:], "dtype": weights[name].half(),
                         "more": weights[name].repeat(2, 1)}[what].contiguous()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        forebay.wrap(tmp_path, {"device": "1GiB", "disk": tmp_path})


def test_what_it_cannot_do_is_refused_by_name(saved: Saved, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="attention with sinks reads no kv8 rows"):
        forebay.wrap(saved("gpt_oss")[0], {"device": "1GiB", "disk": tmp_path}, cache="kv8")
    folder, _ = saved("qwen3_moe")
    with pytest.raises(ExportError, match="whose meaning in ONNX is not known"):
        forebay.export(folder, tmp_path / "onnx", "onnx")
