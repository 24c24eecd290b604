"""Folders of multimodal models run as their language model on text: tokens are those of the whole model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from safetensors import safe_open
from selection import ALL
from transformers import CONFIG_MAPPING

import forebay
from forebay.rewriter.capture.language_model import CaptureError, capture_model
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.checkpoints.text_model import TEXT_ALONE
from forebay.rewriter.machine.profile import Machine

pytestmark = [pytest.mark.filterwarnings("ignore:.*lies in memory"),
              pytest.mark.filterwarnings("ignore:OpenMP threads spin")]

PROMPTS = torch.tensor([[0, 0, 9, 11, 13, 15, 17], [5, 6, 7, 8, 9, 10, 11]])
ASKED: Any = dict(attention_mask=(PROMPTS > 0).long(), max_new_tokens=6, do_sample=False, eos_token_id=None,
                  pad_token_id=0)
TEXT = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=160, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=128, pad_token_id=0, bos_token_id=1,
            eos_token_id=2)
TOWER = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=28,
             patch_size=14)
CLIP, SIGLIP = TOWER | {"model_type": "clip_vision_model"}, TOWER | {"model_type": "siglip_vision_model"}
QWEN = dict(depth=2, hidden_size=32, num_heads=2, intermediate_size=48, out_hidden_size=64, patch_size=14,
            spatial_merge_size=2, deepstack_visual_indexes=[0], num_position_embeddings=16)
MROPE = dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]})
LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
              layer_types=["linear_attention", "full_attention"], **MROPE)
FULL = {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 0}


def of(text: str, tower: dict[str, Any], **own: Any) -> dict[str, Any]:
    """A config by the model types of the language model and the tower."""
    return {"text_config": TEXT | {"model_type": text}, "vision_config": tower, "image_token_id": 150} | own


CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": of("gemma3_text", TOWER, mm_tokens_per_image=4, text_config=TEXT | {
        "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    "mistral3": of("mistral", TOWER | {"model_type": "pixtral", "head_dim": 16}),
    "llava": of("llama", CLIP), "llava_next": of("mistral", CLIP), "llava_onevision": of("qwen2", SIGLIP),
    "vipllava": of("llama", CLIP, vision_feature_layers=[-1, -2]),
    "internvl": of("qwen2", TOWER | {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]}),
    "idefics3": of("llama", TOWER), "smolvlm": of("llama", TOWER), "aya_vision": of("cohere2", SIGLIP),
    "cohere2_vision": of("cohere2", SIGLIP),
    "lfm2_vl": of("lfm2", TOWER | {"model_type": "siglip2_vision_model", "num_patches": 4}, text_config={
        k: v for k, v in TEXT.items() if k != "head_dim"} | {
            "model_type": "lfm2", "layer_types": ["conv", "full_attention"]}),
    "qwen3_5": of("qwen3_5_text", QWEN, text_config=TEXT | LINEAR), "qwen3_5_moe": of(
        "qwen3_5_moe_text", QWEN, text_config=TEXT | LINEAR | {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32}),
    "llama4": of("llama4_text", TOWER | {"projector_input_dim": 32, "projector_output_dim": 32,
                                         "vision_output_dim": 32}, text_config=TEXT | {
        "num_local_experts": 4, "intermediate_size_mlp": 96, "attention_chunk_size": 16,
        "interleave_moe_layer_step": 2}),
    "qwen2_vl": of("qwen2_vl_text", QWEN | {"embed_dim": 32, "hidden_size": 64}, text_config=TEXT | MROPE),
    "qwen2_5_vl": of("qwen2_5_vl_text", QWEN, text_config=TEXT | MROPE),
    "qwen3_vl": of("qwen3_vl_text", QWEN, text_config=TEXT | MROPE),
    "qwen3_vl_moe": of("qwen3_vl_moe_text", QWEN, text_config=TEXT | MROPE | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "gemma4": of("gemma4_text", TOWER, text_config=TEXT | FULL | {"hidden_size_per_layer_input": 0})}
SHOWN = tuple(CONFIGS) if ALL else ("gemma3", "mistral3", "smolvlm", "llama4", "qwen2_5_vl")


def save(kind: str, folder: Path) -> Any:
    """A model with weights that matter, which is returned."""
    torch.manual_seed(0)
    model = T.AutoModelForImageTextToText.from_config(CONFIG_MAPPING[kind](**CONFIGS[kind])).eval()
    for p in model.parameters():
        if p.dim() > 1:
            p.data.normal_(0, 0.2)
    model.save_pretrained(folder)
    return model


def test_every_kind_has_a_case() -> None:
    assert CONFIGS.keys() | {"gemma3n"} == TEXT_ALONE.keys()


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
        assert not any("vision" in weight.name for weight in lm.plan.weights)
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
    with pytest.raises(CaptureError, match="'paligemma' is not a causal language model"):
        capture_model(T.PaliGemmaConfig(text_config=TEXT | {"model_type": "gemma"}, vision_config=SIGLIP))
