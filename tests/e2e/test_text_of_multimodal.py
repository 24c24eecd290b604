"""Folders of multimodal models run as their language model on text: tokens are those of the whole model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from multimodal import CLIP, CONFIGS, FULL, TEXT, save
from safetensors import safe_open
from selection import ALL

import forebay
from forebay.rewriter.capture.language_model import CaptureError, capture_model
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.checkpoints.text_model import MULTIMODAL
from forebay.rewriter.machine.profile import Machine

pytestmark = [pytest.mark.filterwarnings("ignore:.*lies in memory"),
              pytest.mark.filterwarnings("ignore:OpenMP threads spin")]

PROMPTS = torch.tensor([[0, 0, 9, 11, 13, 15, 17], [5, 6, 7, 8, 9, 10, 11]])
ASKED: Any = dict(attention_mask=(PROMPTS > 0).long(), max_new_tokens=6, do_sample=False, eos_token_id=None,
                  pad_token_id=0)
SHOWN = tuple(CONFIGS) if ALL else ("gemma3", "smolvlm", "llama4", "qwen2_5_vl")


def test_every_kind_has_a_case() -> None:
    assert CONFIGS.keys() | {"gemma3n"} == MULTIMODAL.keys()


@pytest.mark.parametrize("kind", SHOWN)
def test_text_alone(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = save(kind, tmp_path)
    if kind == "llama4":  # the whole one fails without images in transformers 5.24
        whole = whole.language_model
    expected = whole.generate(PROMPTS, **ASKED)
    budget = "380kB" if kind in ("gemma3", "mistral3") else "3MB"
    with caplog.at_level(logging.WARNING, "forebay"), forebay.wrap(
            tmp_path, budget, batch=2, prompt=8, new_tokens=8, machine=Machine.default()) as lm:
        assert lm.generate(PROMPTS, **ASKED).tolist() == expected.tolist()
        assert not any("vision" in weight.name or "audio" in weight.name for weight in lm.plan.weights)
    assert not [r for r in caplog.records if r.name.startswith("forebay")], "towers are left out without a word"


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llama4"])
def test_a_module_in_memory(kind: str, tmp_path: Path) -> None:
    whole = save(kind, tmp_path)
    expected = (whole.language_model if kind == "llama4" else whole).generate(PROMPTS, **ASKED)
    with forebay.wrap(whole, "3MB", batch=2, prompt=8, new_tokens=8, machine=Machine.default()) as lm:
        assert lm.generate(PROMPTS, **ASKED).tolist() == expected.tolist()
        assert lm.config is whole.config and not any("vision" in weight.name for weight in lm.plan.weights)
    with pytest.raises(RuntimeError, match=r"was emptied by forebay\.wrap"):
        whole(PROMPTS)


def test_a_tower_that_needs_another_package(tmp_path: Path) -> None:
    """Gemma 3n's needs timm to be built; its language model does not."""
    text = T.Gemma3nTextConfig(**TEXT, **FULL, vocab_size_per_layer_input=160, hidden_size_per_layer_input=16,
                               laurel_rank=8, activation_sparsity_pattern=[0.0] * 2)
    torch.manual_seed(0)
    model: Any = T.Gemma3nForCausalLM(text).eval()
    expected = model.generate(PROMPTS, **ASKED)
    model.save_pretrained(tmp_path, state_dict={
        name.replace("model.", "model.language_model.", 1): p for name, p in model.state_dict().items()})
    T.Gemma3nConfig(text_config=text.to_dict()).save_pretrained(tmp_path)
    with forebay.wrap(tmp_path, "600kB", batch=2, prompt=8, new_tokens=8, machine=Machine.default()) as lm:
        assert lm.generate(PROMPTS, **ASKED).tolist() == expected.tolist()


def test_a_quantized_multimodal_folder_has_no_towers(tmp_path: Path) -> None:
    save("mistral3", tmp_path / "whole")
    quantize_model(tmp_path / "whole", tmp_path / "text", Wish("w8g32"))
    with safe_open(next((tmp_path / "text").glob("*.safetensors")), "pt") as file:
        stored = [name for name in file.keys() if "filler" not in name]  # noqa: SIM118
    assert len(stored) == 20 and not any("vision" in name for name in stored)
    with forebay.wrap(tmp_path / "text", "380kB", batch=2, prompt=8, new_tokens=8, machine=Machine.default()) as lm:
        assert all("vision" not in weight.name for weight in lm.plan.weights)
        assert lm.generate(PROMPTS, **ASKED).shape == (2, 13)


def test_a_kind_that_is_not_its_text_model_is_refused_by_name() -> None:
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4)
    git = T.GitForCausalLM(T.GitConfig(**sizes, vocab_size=160, vision_config=sizes | {"image_size": 28}))
    for config in (T.VideoLlavaConfig(text_config=TEXT | {"model_type": "llama"}, vision_config=CLIP),
                   T.Phi4MultimodalConfig(), T.MllamaConfig(), git.config):
        with pytest.raises(CaptureError, match=f"^models of type '{config.model_type}' are not supported; of mul.*aya"):
            capture_model(config)
    with pytest.raises(CaptureError, match=r"^models of type 'git' are not supported"):
        forebay.wrap(git, "4MB")
