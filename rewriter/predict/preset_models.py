"""Configs of released models, as their config.json has them: numbers of OPT from Zhang et al. 2022, Table 1. What a
mixture of experts leaves out is transformers' default, which is the released model."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _opt(layers: int, hidden: int, heads: int) -> Config:
    return {"model_type": "opt", "num_hidden_layers": layers, "hidden_size": hidden, "ffn_dim": 4 * hidden,
            "num_attention_heads": heads, "vocab_size": 50272, "word_embed_proj_dim": hidden,
            "max_position_embeddings": 2048, "tie_word_embeddings": True, "dtype": "float16"}


def _gated(kind: str, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int,
           positions: int, **more: Any) -> Config:
    return {"model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
            "max_position_embeddings": positions, "tie_word_embeddings": False, "dtype": "float16", **more}


# OPT-350m is absent: its projected embeddings and post-norm layers are unlike its siblings'.
DENSE_CONFIGS: dict[str, Config] = {
    "opt-125m": _opt(12, 768, 12), "opt-1.3b": _opt(24, 2048, 32), "opt-2.7b": _opt(32, 2560, 32),
    "opt-6.7b": _opt(32, 4096, 32), "opt-13b": _opt(40, 5120, 40), "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72), "opt-175b": _opt(96, 12288, 96),
    "llama-2-7b": _gated("llama", 32, 4096, 11008, 32, 32, 32000, 4096),
    "llama-2-13b": _gated("llama", 40, 5120, 13824, 40, 40, 32000, 4096),
    "llama-2-70b": _gated("llama", 80, 8192, 28672, 64, 8, 32000, 4096),
    "codellama-34b": _gated("llama", 48, 8192, 22016, 64, 8, 32000, 16384),
    "llama-3-8b": _gated("llama", 32, 4096, 14336, 32, 8, 128256, 8192),
    "llama-3-70b": _gated("llama", 80, 8192, 28672, 64, 8, 128256, 8192),
    "llama-3.1-405b": _gated("llama", 126, 16384, 53248, 128, 8, 128256, 131072),
    "qwen2.5-0.5b": _gated("qwen2", 24, 896, 4864, 14, 2, 151936, 32768) | {"tie_word_embeddings": True},
    "qwen2.5-7b": _gated("qwen2", 28, 3584, 18944, 28, 4, 152064, 131072),
    "qwen2.5-32b": _gated("qwen2", 64, 5120, 27648, 40, 8, 152064, 131072),
    "qwen2.5-72b": _gated("qwen2", 80, 8192, 29568, 64, 8, 152064, 131072),
    "qwen3-8b": _gated("qwen3", 36, 4096, 12288, 32, 8, 151936, 40960, head_dim=128),
    "qwen3-32b": _gated("qwen3", 64, 5120, 25600, 64, 8, 151936, 40960, head_dim=128),
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096,
         "beta_fast": 32.0, "beta_slow": 1.0}  # of DeepSeek


def _deepseek(kind: str, mscale: float, **more: Any) -> Config:
    yarn = _YARN | {"mscale": mscale, "mscale_all_dim": mscale}
    return {"model_type": kind, "dtype": "bfloat16", "max_position_embeddings": 163840, "rope_parameters": yarn, **more}


EXPERT_CONFIGS: dict[str, Config] = {
    "mixtral-8x7b": {"model_type": "mixtral", "dtype": "bfloat16"},
    "mixtral-8x22b": _gated("mixtral", 56, 6144, 16384, 48, 8, 32768, 65536, dtype="bfloat16"),
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32, "dtype": "bfloat16"},
    "gpt-oss-120b": {"model_type": "gpt_oss", "dtype": "bfloat16"},
    "qwen3-30b-a3b": _gated("qwen3_moe", 48, 2048, 6144, 32, 4, 151936, 40960, head_dim=128, num_experts=128,
                            num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, dtype="bfloat16"),
    "qwen3-235b-a22b": _gated("qwen3_moe", 94, 4096, 12288, 64, 4, 151936, 40960, head_dim=128, num_experts=128,
                              num_experts_per_tok=8, moe_intermediate_size=1536, norm_topk_prob=True,
                              dtype="bfloat16"),
    "qwen3-next-80b-a3b": {"model_type": "qwen3_next", "dtype": "bfloat16"},
    "glm-4.5-air": {"model_type": "glm4_moe", "dtype": "bfloat16"},
    "glm-4.5": _gated("glm4_moe", 92, 5120, 12288, 96, 8, 151552, 131072, head_dim=128, n_routed_experts=160,
                      moe_intermediate_size=1536, first_k_dense_replace=3, use_qk_norm=True, dtype="bfloat16"),
    "llama-4-scout": {"model_type": "llama4_text", "dtype": "bfloat16"},
    "llama-4-maverick": {"model_type": "llama4_text", "num_local_experts": 128, "interleave_moe_layer_step": 2,
                         "dtype": "bfloat16"},
    "dbrx": {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768,
             "vocab_size": 100352, "attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 5e5},
             "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}, "dtype": "bfloat16"},
    "longcat-flash": {"model_type": "longcat_flash", "dtype": "bfloat16"},
    "minimax-m2": {"model_type": "minimax_m2", "dtype": "bfloat16"},
    "deepseek-v2": _deepseek("deepseek_v2", 0.707, vocab_size=102400, hidden_size=5120, intermediate_size=12288,
                             moe_intermediate_size=1536, num_hidden_layers=60, num_attention_heads=128,
                             num_key_value_heads=128, n_shared_experts=2, n_routed_experts=160, kv_lora_rank=512,
                             q_lora_rank=1536, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
                             topk_method="group_limited_greedy", n_group=8, topk_group=3, num_experts_per_tok=6,
                             first_k_dense_replace=1, norm_topk_prob=False, routed_scaling_factor=16.0),
    "deepseek-v3": _deepseek("deepseek_v3", 1.0),
    "kimi-k2": {"model_type": "deepseek_v3", "dtype": "bfloat16", "vocab_size": 163840, "n_routed_experts": 384,
                "num_attention_heads": 64, "num_key_value_heads": 64, "n_group": 1, "topk_group": 1,
                "first_k_dense_replace": 1, "max_position_embeddings": 131072},
}
PRESET_CONFIGS = DENSE_CONFIGS | EXPERT_CONFIGS
