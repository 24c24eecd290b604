"""Tiny multimodal models with random weights, a config for each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as T
from transformers import CONFIG_MAPPING

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
GRIDS = [[28, 28], [28, 56]]  # sizes that images are cut into
FULL = {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 0}


def of(text: str, tower: dict[str, Any], **own: Any) -> dict[str, Any]:
    """A config by the model types of the language model and the tower."""
    return {"text_config": TEXT | {"model_type": text}, "vision_config": tower, "image_token_id": 150} | own


CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": of("gemma3_text", TOWER, mm_tokens_per_image=4, tie_word_embeddings=False, text_config=TEXT | {
        "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    "mistral3": of("mistral", TOWER | {"model_type": "pixtral", "head_dim": 16}),
    "llava": of("llama", CLIP), "llava_next": of("mistral", CLIP, image_grid_pinpoints=GRIDS),
    "llava_onevision": of("qwen2", SIGLIP, image_grid_pinpoints=GRIDS),
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
    "llama4": of("llama4_text", TOWER | {
        "image_size": 56, "intermediate_size": 128, "projector_input_dim": 32, "projector_output_dim": 32,
        "vision_output_dim": 32}, text_config=TEXT | {
            "num_local_experts": 4, "intermediate_size_mlp": 96, "attention_chunk_size": 16,
            "interleave_moe_layer_step": 2}),
    "qwen2_vl": of("qwen2_vl_text", QWEN | {"embed_dim": 32, "hidden_size": 64}, text_config=TEXT | MROPE),
    "qwen2_5_vl": of("qwen2_5_vl_text", QWEN, text_config=TEXT | MROPE),
    "qwen3_vl": of("qwen3_vl_text", QWEN, text_config=TEXT | MROPE),
    "qwen3_vl_moe": of("qwen3_vl_moe_text", QWEN, text_config=TEXT | MROPE | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "gemma4": of("gemma4_text", {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16, "num_attention_heads": 2,
        "num_key_value_heads": 2, "pooling_kernel_size": 2, "patch_size": 4, "position_embedding_size": 16},
        tie_word_embeddings=False, text_config=TEXT | FULL | {
            "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "pad_token_id": 5,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 160, "global_head_dim": 16,
            "use_bidirectional_attention": "vision"}),
    "qwen2_audio": dict(audio_token_index=150, text_config=TEXT | {"model_type": "qwen2"}, audio_config=dict(
        model_type="qwen2_audio_encoder", d_model=32, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=48,
        num_mel_bins=80)),
    "voxtral": dict(audio_token_id=150, text_config=TEXT | {"model_type": "llama"}, audio_config=dict(
        model_type="voxtral_encoder", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
        num_mel_bins=80, vocab_size=160)),
    "paligemma": of("gemma", SIGLIP, projection_dim=64, vocab_size=160)}


def save(kind: str, folder: Path, config: dict[str, Any] | None = None) -> Any:
    """A model with weights that matter, which is returned; of the kind's config by default."""
    torch.manual_seed(0)
    model = T.AutoModelForMultimodalLM.from_config(CONFIG_MAPPING[kind](**config or CONFIGS[kind])).eval()
    for p in model.parameters():
        if p.dim() > 1:
            p.data.normal_(0, 0.2)
    if kind == "gemma4":  # which reads its own image tokens as padding
        model.lm_head.weight.data[150] = 0
    model.save_pretrained(folder)
    return model
