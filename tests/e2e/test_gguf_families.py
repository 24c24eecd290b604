"""GGUF files of recurrent models, of mixtures of experts and of other families: what they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from converted_gguf import MODELS, write_converted
from prompted_experts import smallest
from selection import without
from transformers import AutoModelForCausalLM

import forebay
from forebay.rewriter.checkpoints import resolve
from forebay.rewriter.checkpoints.gguf import convert_gguf
from forebay.rewriter.checkpoints.gguf_architectures import ARCHITECTURES
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.packed import read_dequantized
from forebay.rewriter.checkpoints.resolve import resolve_model

pytestmark = [pytest.mark.filterwarnings("ignore:.*lies in memory"),
              pytest.mark.filterwarnings("ignore:OpenMP threads spin")]
FOLDED = {"falcon_h1"}  # whose factors are multiplied into the weights
OF_EACH_KIND = {"cohere2", "deepseek_v3", "falcon_h1", "gpt_oss", "granitemoehybrid", "llama4_text", "mamba2",
                "qwen3_5_moe_text", "qwen3_next"}


def tokens_of(model: Any, ids: torch.Tensor, new: int) -> torch.Tensor:
    """By forwards of all tokens: transformers' own second chunk is wrong of Mamba."""
    with torch.no_grad():
        for _ in range(new):
            ids = torch.cat((ids, model(ids[None], use_cache=False).logits[0, -1:].argmax(-1)))
    return ids[-new:]


@pytest.mark.parametrize("name", without(MODELS, set(MODELS) - OF_EACH_KIND))
def test_a_file_holds_the_model_that_it_was_made_from(tmp_path: Path, name: str) -> None:
    model = write_converted(tmp_path / "m.gguf", name)
    found = AutoModelForCausalLM.from_pretrained(convert_gguf(tmp_path / "m.gguf", tmp_path / "out"),
                                                 attn_implementation="eager", dtype=torch.float32)
    ids = torch.randint(3, 288, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want, logits = (each(ids, use_cache=False).logits for each in (model, found))
    assert torch.allclose(logits, want, rtol=1e-4, atol=1e-5), (logits - want).abs().max()
    if name not in FOLDED:
        stored = found.state_dict()
        assert all(torch.allclose(value, stored[key], rtol=1e-5, atol=2e-6)
                   for key, value in model.state_dict().items())


PACKED = [(name, kinds) for name in MODELS for kinds in (("Q8_0", "Q4_0"), ("MXFP4",))]
ALWAYS = {("gpt_oss", "MXFP4"), ("mamba2", "Q8_0")}


@pytest.mark.parametrize(("name", "kinds"), without(
    PACKED, [(name, kinds) for name, kinds in PACKED if (name, kinds[0]) not in ALWAYS]))
def test_packed_matrices_give_the_tokens_of_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kinds: tuple[str, ...]
) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(resolve, "cache_folder", lambda: tmp_path / "cache")
    write_converted(tmp_path / "m.gguf", name, kinds)
    model = AutoModelForCausalLM.from_pretrained(convert_gguf(tmp_path / "m.gguf", tmp_path / "values"),
                                                 attn_implementation="eager").eval()
    folder = resolve_model(tmp_path / "m.gguf")
    for own, record in open_checkpoint(folder).tensors.items():
        if record.packed is not None:
            values, theirs = read_dequantized(record), model.get_parameter(own)
            assert (values - theirs).norm() < 0.006 * theirs.norm(), own
            theirs.data = values
    ids = torch.randint(3, 288, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9) >= 9 - torch.tensor([9, 5, 1])[:, None]).long()
    want = torch.stack([tokens_of(model, row[m.bool()], 4) for row, m in zip(ids, mask, strict=True)])
    for budget, chunk in ((smallest(folder) + (48 << 10), 4), (16 << 20, 16)):
        with forebay.wrap(folder, {"device": budget, "disk": tmp_path}, batch=3, prompt=9, new_tokens=4,
                          prefill_chunk=chunk) as lm:
            found = lm.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, eos_token_id=None)
        assert torch.equal(found[:, 9:], want), budget


def test_every_architecture_is_written_by_a_test() -> None:
    from tiny_gguf import CONFIGS

    assert set(ARCHITECTURES) == {architecture for architecture, _ in MODELS.values()} | (CONFIGS.keys() - {"mixtral"})
