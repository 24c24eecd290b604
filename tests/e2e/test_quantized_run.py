"""Weights stored as packed rows, and a packed cache: the tokens of the unpacked model, and the bytes counted.

The suite keeps both packed caches of two families and one of each other; FOREBAY_TEST_ALL=1 (`make test-all`) both of
all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import transformers
from opened import open_rewritten
from selection import ALL, without
from typer.testing import CliRunner

import forebay
import forebay.rewriter.pipeline.pass_list as pipeline
from forebay.commands.app import app
from forebay.language_model import LanguageModel
from forebay.passes.quantize.quantize_weights import quantize_weights
from forebay.rewriter.checkpoints import quantize
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.packed import read_dequantized
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.ir.plan import Budget, Workload
from forebay.rewriter.ir.program import Copy, FileSlice, Launch
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.planning.options import Options

pytestmark = pytest.mark.usefixtures("private_cache")  # notes on verified checkpoints are kept there
WIDE = {"llama": {"hidden_size": 256, "intermediate_size": 2048}, "gpt2": {"n_embd": 384}}
CACHES = {"kv8": 0.02, "kv4": 0.3}  # the most that logits may differ by, relative to theirs
# Beside a plain one, which streams, matrices stored the other way, windows and softcaps, and fused products.
LEFT = ("opt", "opt_projected", "qwen2", "qwen3", "mistral", "phi3", "gpt_neox", "llama4")
KEPT = {family: list(CACHES) if ALL or family in ("llama", "gemma2") else [list(CACHES)[i % 2]]
        for i, family in enumerate(families.FAMILIES)}


def saved(family: str, folder: Path, dtype: torch.dtype = torch.float32, **sizes: int) -> Path:
    torch.manual_seed(3)
    config = getattr(families, family)(**sizes)
    transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


def unpacked(original: Path, packed: Path) -> Any:
    """transformers' model with the weights that the packed rows stand for."""
    model = transformers.AutoModelForCausalLM.from_pretrained(original)
    state = model.state_dict()
    for name, record in open_checkpoint(packed).tensors.items():
        if record.packed is not None:
            key = next(k for k in (name, f"model.{name}", f"transformer.{name}") if k in state)
            state[key].copy_(read_dequantized(record))
    return model.eval()


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, families.VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = mask[2, :2] = 0
    return ids * mask, mask


@pytest.mark.parametrize(("format", "hidden"), [("w4g48", 144), ("w4g16", 112)])
def test_folders_in_formats_that_are_no_longer_written_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, hidden: int
) -> None:
    original = saved("llama", tmp_path / "original", hidden_size=hidden)
    with pytest.raises(CheckpointError, match="no kernel reads"):
        quantize_model(original, tmp_path / "packed", Wish(format, head=True, embeddings=True))
    monkeypatch.setattr(quantize, "product_refusal", lambda *_: "")
    quantize_model(original, tmp_path / "packed", Wish(format, head=True, embeddings=True))
    ids = prompts()[0]
    with forebay.wrap(tmp_path / "packed", "8MB", batch=3, prompt=9, new_tokens=2) as lm, torch.no_grad():
        wanted = unpacked(original, tmp_path / "packed")(ids).logits[:, -1]
        torch.testing.assert_close(lm.next_logits(ids), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("family", "format"), without(
    [*((f, "w4g32") for f in families.FAMILIES), ("llama", "w8"), ("gpt2", "w8")],
    [*((f, "w4g32") for f in LEFT), ("llama", "w8")]))
def test_tokens_are_those_of_the_unpacked_model(tmp_path: Path, family: str, format: str) -> None:
    """Of all families with their weights resident, of two, which are wide enough for that, streamed as well."""
    original = saved(family, tmp_path / "original", **WIDE.get(family, {}))
    packed = tmp_path / "packed"
    quantize_model(original, packed, Wish(format))
    expected = unpacked(original, packed).generate(
        **dict(zip(("input_ids", "attention_mask"), prompts(), strict=True)), max_new_tokens=8, do_sample=False,
        eos_token_id=None, pad_token_id=0)
    ids, mask = prompts()
    opened, work = open_rewritten(packed), Workload(3, 9, 8)
    budget = 1 << 30
    for streams in (False, True) if family in WIDE else (False,):
        with LanguageModel(*opened, Budget(budget), work, Options()) as lm:
            assert any(w.format == format and w.tier == "disk" for w in lm.plan.weights) is streams
            smallest = lm.steps.pipeline.smallest_budget()
            budget = int(smallest + 0.15 * (lm.plan.arenas["device"] + (1 << 22) - smallest))
            got = lm.generate(ids, attention_mask=mask, max_new_tokens=8, eos_token_id=None, pad_token_id=0)
            program = lm.steps.program(1)
            used = {i.op for i in program.step if isinstance(i, Launch)}
        assert "forebay.linear_q" in used and "forebay.dequantize_rows" not in used, "unpacking is folded everywhere"
        assert torch.equal(got, expected)


def test_what_crosses_the_link_is_packed(tmp_path: Path) -> None:
    """w4g64 streams at most 0.29 of the bytes that 16-bit weights do."""
    config = families.llama(hidden_size=256, intermediate_size=512, num_attention_heads=4)
    original = tmp_path / "original"
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(original)
    quantize_model(original, tmp_path / "packed", Wish("w4g64"))
    streamed: dict[str, dict[str, int]] = {}
    for folder in ("original", "packed"):
        with forebay.wrap(tmp_path / folder, 1 << 30, batch=1, prompt=4, new_tokens=4) as lm:
            smallest = lm.steps.pipeline.smallest_budget()
        with forebay.wrap(tmp_path / folder, smallest, batch=1, prompt=4, new_tokens=4) as lm:
            counted: dict[str, int] = {}
            for item in lm.steps.program(1).step:
                if isinstance(item, Copy) and isinstance(item.src, FileSlice):
                    name = item.label.split()[1].split("[")[0]
                    counted[name] = counted.get(name, 0) + item.src.nbytes
            streamed[folder] = counted
    matrices = [n for n in streamed["packed"] if ".layers." in n and n in streamed["original"]]
    assert len(matrices) >= 7
    ratio = sum(streamed["packed"][n] for n in matrices) / sum(streamed["original"][n] for n in matrices)
    assert ratio <= 0.29


def test_layers_stored_otherwise_have_blocks_of_their_own(tmp_path: Path) -> None:
    original = saved("llama", tmp_path / "original")
    packed = tmp_path / "packed"
    quantize_model(original, packed, Wish("w4g32", (("*.layers.1.*", "w8"), ("*.layers.2.mlp.*", "native")),
                                          head=True, embeddings=True))
    ids, mask = prompts()
    expected = unpacked(original, packed)(ids, attention_mask=mask).logits[:, -1]
    with forebay.wrap(packed, 1 << 30, batch=3, prompt=9, new_tokens=1) as lm:
        assert len(set(rewrite_captured(lm.captured, lm.switches).layers)) == 3
        got = lm.next_logits(ids, mask)
        torch.testing.assert_close(got.float(), expected.float(), rtol=2e-3, atol=2e-3)
        formats = {w.format for w in lm.plan.weights}
    assert {"w4g32", "w8", "native"} <= formats


def test_left_unfused_it_still_computes_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = saved("llama", tmp_path / "original")
    packed = tmp_path / "packed"
    quantize_model(original, packed, Wish("w4g32"))
    ids, mask = prompts()
    with forebay.wrap(packed, 1 << 30, batch=3, prompt=9, new_tokens=4) as lm:
        expected = lm.generate(ids, attention_mask=mask, max_new_tokens=4, eos_token_id=None, pad_token_id=0)
    monkeypatch.setattr(pipeline, "PASSES", [each for each in pipeline.PASSES if each.name != "fuse_dequantize"])
    with forebay.wrap(packed, 1 << 30, batch=3, prompt=9, new_tokens=4) as lm:
        got = lm.generate(ids, attention_mask=mask, max_new_tokens=4, eos_token_id=None, pad_token_id=0)
        assert any(i.op == "forebay.dequantize_rows" for i in lm.steps.program(1).step
                   if isinstance(i, Launch))
    assert torch.equal(got, expected)


def test_graphs_without_packed_weights_are_left_alone() -> None:
    lm = families.captured("llama")
    before = [n.name for n in lm.step.graph.nodes]
    quantize_weights(lm.step, {})
    assert [n.name for n in lm.step.graph.nodes] == before


@pytest.mark.parametrize("family", without(KEPT, LEFT))
def test_a_packed_cache_gives_nearly_the_logits_of_a_plain_one(tmp_path: Path, family: str) -> None:
    """Over several steps, with prompts of unequal length; the cache takes the bytes of packed rows."""
    opened = open_rewritten(saved(family, tmp_path / "model"))
    ids, mask = prompts()
    found, sizes = {}, {}
    for cache in ("native", *KEPT[family]):
        with LanguageModel(*opened, Budget(1 << 30), Workload(3, 9, 4), Options(cache=cache)) as lm:
            lm.generate(ids, attention_mask=mask, max_new_tokens=3, eos_token_id=None, pad_token_id=0)
            found[cache] = lm.next_logits(ids, mask).float()
            sizes[cache] = sum(lm.steps.pipeline.needs.cache.values())
            assert lm.plan.cache_format == cache
            used = {i.op for i in lm.steps.program(1).step if isinstance(i, Launch)}
            assert ("forebay.attention_q" in used) is (cache != "native")
    for format in KEPT[family]:
        assert sizes[format] < 0.6 * sizes["native"]
        error = (found[format] - found["native"]).norm() / (found["native"] - found["native"].mean()).norm()
        assert 0 < error < CACHES[format], format


def test_a_saved_plan_brings_its_cache_format_along(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    ids, mask = prompts()
    with forebay.wrap(folder, 1 << 30, batch=3, prompt=9, new_tokens=4, cache="kv8") as lm:
        expected = lm.next_logits(ids, mask).clone()
        lm.plan.save(tmp_path / "plan.json")
    plan = forebay.rewriter.ir.plan.load_plan(tmp_path / "plan.json")
    with forebay.wrap(folder, 1 << 30, plan=plan) as lm:
        assert torch.equal(lm.next_logits(ids, mask), expected)
    with pytest.raises(forebay.rewriter.ir.plan.PlanError, match="no cache format 'kv2'"):
        forebay.wrap(folder, 1 << 30, prompt=9, new_tokens=4, cache="kv2")


def test_the_commands_take_quantized_folders_and_cache_formats(tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    quantize_model(saved("llama", tmp_path / "original"), packed, Wish("w4g32"))
    shape = ["--budget", "device=8MB", "--prompt", "9", "--new-tokens", "4", "--json"]
    found = {}
    for cache in ("native", "kv4"):
        result = CliRunner().invoke(app, ["plan", str(packed), *shape, "--cache", cache])
        assert result.exit_code == 0, result.output
        found[cache] = json.loads(result.stdout)
        assert found[cache]["cache_format"] == cache
        assert {w["format"] for w in found[cache]["weights"]} == {"native", "w4g32"}
    sizes = {c: sum(b["nbytes"] for b in p["buffers"] if b["kind"] == "cache") for c, p in found.items()}
    assert sizes["kv4"] < 0.3 * sizes["native"]
    refused = CliRunner().invoke(app, ["plan", str(packed), *shape, "--cache", "kv2"])
    assert refused.exit_code == 2 and "no cache format 'kv2'" in refused.output
