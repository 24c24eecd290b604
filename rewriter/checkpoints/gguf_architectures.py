"""How GGUF's architectures become models of transformers: the one table of them.

Source: each architecture's `load_arch_hparams` in llama.cpp, src/models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forebay.rewriter.checkpoints.gguf_keys import (
    ATTENTION_CAP,
    DIMENSIONS,
    FINAL_CAP,
    FINETUNED,
    GPT2_SIZES,
    GROUPS,
    HEADS,
    KV_HEADS,
    LAYER_NORM,
    LEADING_DENSE,
    NEXTN,
    PATTERN,
    PER_LAYER,
    RMS,
    ROPE,
    SHARED_KV,
    SIZES,
    SPARSITY,
    SSM,
    SSM_GROUPS,
    WINDOW,
    WINDOW_BASE,
    WINDOW_DIMENSIONS,
    WINDOW_VALUE_WIDTH,
    WINDOW_WIDTH,
)


@dataclass(frozen=True)
class Architecture:
    """How one of GGUF's architectures becomes a model of transformers.

    Attributes:
        model_type: the name that transformers gives to the architecture.
        fields: the config field that each key sets; each key must be there unless `defaults` has it.
        reads: keys that `gguf_config` and `gguf_layers` turn into fields in ways of their own.
        defaults: the value that llama.cpp takes for an absent key.
        head_field: whether the config states the width of heads; otherwise it follows from width and heads.
        partial: whether a part of each head's channels may be rotated.
        rotary: whether queries and keys are rotated.
        attention_bias: the config's field, if any, for biases of all four matrices of attention.
        mlp_bias: the same for the feed-forward matrices.
        constants: fields of the config that follow from the architecture.
        unread: keys that no layer of such a model counts on.
    """

    model_type: str
    fields: Mapping[str, str]
    reads: frozenset[str] = HEADS | ROPE
    defaults: Mapping[str, float] = field(default_factory=dict)
    head_field: bool = False
    partial: bool = False
    rotary: bool = True
    attention_bias: str = ""
    mlp_bias: str = ""
    constants: Mapping[str, object] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()


EXPERTS = {"expert_used_count": "num_experts_per_tok"}
QWEN_EXPERTS = EXPERTS | {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"}
LOCAL_EXPERTS = EXPERTS | {"expert_count": "num_local_experts"}
ROUTED_EXPERTS = EXPERTS | {
    "expert_count": "n_routed_experts", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts", "expert_weights_scale": "routed_scaling_factor"}
SHARED_WIDTH = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
RMS_SIZES = SIZES | {RMS: "rms_norm_eps"}
MIXED_SIZES = {key: name for key, name in RMS_SIZES.items() if key != KV_HEADS}  # layers of several kinds
BARE_SIZES = {"block_count": "num_hidden_layers", "embedding_length": "hidden_size", RMS: "layer_norm_epsilon",
              "ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size"}
NO_HEADS = frozenset({"context_length", "feed_forward_length", "attention.head_count", KV_HEADS})
GRANITE = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
           "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}
GRANITE_DEFAULTS = {"attention.scale": 0.0, "embedding_scale": 0.0, "residual_scale": 0.0, "logit_scale": 0.0}
DELTA = {"ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
         SSM_GROUPS: "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads"}
DELTA_READS = HEADS | ROPE | {"ssm.inner_size", "attention.recurrent_layers", "full_attention_interval", NEXTN}
SHARING = {WINDOW: "sliding_window", SHARED_KV: "num_kv_shared_layers", PER_LAYER: "hidden_size_per_layer_input"}
SECTIONS = frozenset({"rope.dimension_sections"})  # of images' positions; those of a text are equal in all of them
LATENT = frozenset({KV_HEADS, "attention.q_lora_rank", "attention.kv_lora_rank", "attention.key_length_mla",
                    "attention.value_length_mla", "expert_gating_func", "expert_weights_norm", LEADING_DENSE, NEXTN,
                    "rope.scaling.yarn_log_multiplier"}) | GROUPS

ARCHITECTURES: dict[str, Architecture] = {
    "arcee": Architecture("arcee", RMS_SIZES, head_field=True, attention_bias="attention_bias", mlp_bias="mlp_bias"),
    "cohere2": Architecture(
        "cohere2", SIZES | {LAYER_NORM: "layer_norm_eps", WINDOW: "sliding_window", "logit_scale": "logit_scale"},
        HEADS | ROPE | {PATTERN, WINDOW_BASE}, {PATTERN: 4}, head_field=True),
    "command-r": Architecture(
        "cohere", SIZES | {LAYER_NORM: "layer_norm_eps", "logit_scale": "logit_scale"}, defaults={"logit_scale": 0.0}),
    "deepseek2": Architecture(
        "deepseek_v2", MIXED_SIZES | ROUTED_EXPERTS, HEADS | ROPE | LATENT, {"expert_weights_scale": 0.0}),
    "exaone4": Architecture(
        "exaone4", RMS_SIZES | {WINDOW: "sliding_window"}, HEADS | ROPE | {PATTERN, WINDOW_BASE},
        {WINDOW: 0, PATTERN: 4}, head_field=True),
    "falcon-h1": Architecture(
        "falcon_h1", RMS_SIZES | {"ssm.inner_size": "mamba_d_ssm", "ssm.conv_kernel": "mamba_d_conv",
                                  "ssm.state_size": "mamba_d_state", "ssm.time_step_rank": "mamba_n_heads",
                                  SSM_GROUPS: "mamba_n_groups"},
        head_field=True, constants={"mamba_norm_before_gate": False}),
    "gemma": Architecture("gemma", RMS_SIZES, head_field=True, attention_bias="attention_bias"),
    "gemma2": Architecture(
        "gemma2", RMS_SIZES | {ATTENTION_CAP: "attn_logit_softcapping", FINAL_CAP: "final_logit_softcapping",
                               WINDOW: "sliding_window"},
        HEADS | ROPE | {PATTERN, WINDOW_BASE},
        {ATTENTION_CAP: 50.0, FINAL_CAP: 30.0, WINDOW: 4096, PATTERN: 2}, head_field=True,
        attention_bias="attention_bias"),
    "gemma3": Architecture(
        "gemma3_text", RMS_SIZES | {FINAL_CAP: "final_logit_softcapping", WINDOW: "sliding_window"},
        HEADS | ROPE | {PATTERN, WINDOW_BASE},
        {FINAL_CAP: 0.0, WINDOW: 0, PATTERN: 6, WINDOW_BASE: 10000.0}, head_field=True,
        attention_bias="attention_bias"),
    "gemma3n": Architecture(
        "gemma3n_text", RMS_SIZES | SHARING | {FINAL_CAP: "final_logit_softcapping",
                                               "altup.active_idx": "altup_active_idx",
                                               "altup.num_inputs": "altup_num_inputs"},
        HEADS | ROPE | {PATTERN, WINDOW_BASE, SPARSITY}, {FINAL_CAP: 30.0, PATTERN: 5}, head_field=True),
    "gemma4": Architecture(
        "gemma4_text", {key: name for key, name in MIXED_SIZES.items() if key != "feed_forward_length"} | SHARING | {
            FINAL_CAP: "final_logit_softcapping", "expert_count": "num_experts", "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size"},
        HEADS | ROPE | {PATTERN, WINDOW_BASE, KV_HEADS, WINDOW_WIDTH, WINDOW_VALUE_WIDTH, WINDOW_DIMENSIONS,
                        "feed_forward_length"},
        {FINAL_CAP: 0.0, SHARED_KV: 0, PER_LAYER: 0, "expert_count": 0, "expert_used_count": 0,
         "expert_feed_forward_length": 0}, head_field=True),
    "glm4": Architecture("glm4", RMS_SIZES, HEADS | ROPE | {NEXTN}, head_field=True, partial=True),
    "glm4moe": Architecture(
        "glm4_moe", RMS_SIZES | ROUTED_EXPERTS | {LEADING_DENSE: "first_k_dense_replace"},
        HEADS | ROPE | SECTIONS | GROUPS | {"expert_gating_func", "expert_weights_norm", NEXTN},
        {LEADING_DENSE: 0, "expert_weights_scale": 0.0}, head_field=True, partial=True),
    "gpt2": Architecture("gpt2", GPT2_SIZES | {LAYER_NORM: "layer_norm_epsilon"}, HEADS | {KV_HEADS}, rotary=False),
    "gpt-oss": Architecture(
        "gpt_oss", {key: name for key, name in RMS_SIZES.items() if key != "feed_forward_length"} | LOCAL_EXPERTS | {
            "expert_feed_forward_length": "intermediate_size", WINDOW: "sliding_window"},
        HEADS | ROPE | {PATTERN, WINDOW_BASE}, {PATTERN: 2}, head_field=True,
        unread=frozenset({"feed_forward_length"})),
    "granite": Architecture("granite", RMS_SIZES | GRANITE, HEADS | ROPE | {FINETUNED}, GRANITE_DEFAULTS,
                            attention_bias="attention_bias", mlp_bias="mlp_bias"),
    "granitehybrid": Architecture(
        "granitemoehybrid", MIXED_SIZES | GRANITE | LOCAL_EXPERTS | {
            "expert_shared_feed_forward_length": "shared_intermediate_size", "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state", "ssm.time_step_rank": "mamba_n_heads", SSM_GROUPS: "mamba_n_groups"},
        HEADS | ROPE | {KV_HEADS, FINETUNED, "ssm.inner_size"},
        GRANITE_DEFAULTS | {"expert_count": 0, "expert_used_count": 0}),
    "granitemoe": Architecture("granitemoe", RMS_SIZES | GRANITE | LOCAL_EXPERTS, defaults=GRANITE_DEFAULTS),
    "jamba": Architecture(
        "jamba", MIXED_SIZES | EXPERTS | {
            "expert_count": "num_experts", "ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state",
            "ssm.time_step_rank": "mamba_dt_rank"},
        HEADS | {KV_HEADS, "ssm.inner_size"}, {"expert_count": 0, "expert_used_count": 0}, rotary=False,
        constants={"use_mamba_kernels": False}),
    "kimi-linear": Architecture(
        "kimi_linear", MIXED_SIZES | ROUTED_EXPERTS | {
            "expert_count": "num_local_experts", "ssm.conv_kernel": "linear_conv_kernel_dim",
            "kda.head_dim": "linear_head_dim"},
        HEADS | LATENT | {DIMENSIONS}, {"expert_weights_scale": 0.0}, rotary=False),
    "lfm2": Architecture(
        "lfm2", {key: name for key, name in MIXED_SIZES.items() if key != RMS} | {
            RMS: "norm_eps", "shortconv.l_cache": "conv_L_cache"},
        HEADS | ROPE | {KV_HEADS}, constants={"block_auto_adjust_ff_dim": False}),
    "lfm2moe": Architecture(
        "lfm2_moe", {key: name for key, name in MIXED_SIZES.items() if key != RMS} | QWEN_EXPERTS | {
            RMS: "norm_eps", "shortconv.l_cache": "conv_L_cache", LEADING_DENSE: "num_dense_layers"},
        HEADS | ROPE | {KV_HEADS, "expert_gating_func"}, {LEADING_DENSE: 0}, constants={"norm_topk_prob": True}),
    "llama": Architecture("llama", RMS_SIZES, head_field=True, attention_bias="attention_bias", mlp_bias="mlp_bias"),
    "llama4": Architecture(
        "llama4_text", {key: name for key, name in RMS_SIZES.items() if key != "feed_forward_length"} | LOCAL_EXPERTS
        | {"feed_forward_length": "intermediate_size_mlp", "expert_feed_forward_length": "intermediate_size",
           "interleave_moe_layer_step": "interleave_moe_layer_step"},
        HEADS | ROPE | {WINDOW}, head_field=True,
        constants={"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}),
    "mamba": Architecture(
        "mamba", BARE_SIZES | {"ssm.inner_size": "intermediate_size", "ssm.time_step_rank": "time_step_rank"},
        frozenset({"ssm.dt_b_c_rms", "vocab_size"}), rotary=False, unread=NO_HEADS),
    "mamba2": Architecture(
        "mamba2", BARE_SIZES | {"ssm.time_step_rank": "num_heads", SSM_GROUPS: "n_groups"},
        frozenset({"ssm.inner_size", "vocab_size"}), rotary=False, unread=NO_HEADS),
    "nemotron": Architecture("nemotron", SIZES | {LAYER_NORM: "norm_eps"}, head_field=True, partial=True,
                             attention_bias="attention_bias", mlp_bias="mlp_bias"),
    "nemotron_h": Architecture(
        "nemotron_h", {key: name for key, name in MIXED_SIZES.items() if key not in (RMS, "feed_forward_length")} | SSM,
        HEADS | {KV_HEADS, RMS, LAYER_NORM, "feed_forward_length", "ssm.inner_size"}, head_field=True, rotary=False),
    "olmo": Architecture("olmo", SIZES | {"attention.clamp_kqv": "clip_qkv"}, HEADS | ROPE | {LAYER_NORM},
                         {"attention.clamp_kqv": 0.0}),
    "olmo2": Architecture("olmo2", RMS_SIZES, HEADS | ROPE | {WINDOW, PATTERN, WINDOW_BASE}, {PATTERN: 4}),
    "olmoe": Architecture("olmoe", RMS_SIZES | EXPERTS | {"expert_count": "num_experts"},
                          constants={"norm_topk_prob": False}),
    # llama.cpp reads the window of Phi3 and leaves it out, with a warning; the model was trained with it
    "phi3": Architecture("phi3", RMS_SIZES | {WINDOW: "sliding_window"}, defaults={WINDOW: 0}, partial=True),
    "qwen2": Architecture("qwen2", RMS_SIZES, head_field=True),
    "qwen2moe": Architecture(
        "qwen2_moe", RMS_SIZES | QWEN_EXPERTS | SHARED_WIDTH, constants={"norm_topk_prob": False},
        unread=frozenset({"feed_forward_length"})),
    "qwen3": Architecture("qwen3", RMS_SIZES, head_field=True, attention_bias="attention_bias"),
    "qwen3moe": Architecture(
        "qwen3_moe", RMS_SIZES | QWEN_EXPERTS, head_field=True, attention_bias="attention_bias",
        constants={"norm_topk_prob": True}, unread=frozenset({"feed_forward_length"})),
    "qwen3next": Architecture(
        "qwen3_next", RMS_SIZES | QWEN_EXPERTS | SHARED_WIDTH | DELTA, DELTA_READS, head_field=True, partial=True,
        constants={"norm_topk_prob": True}, unread=frozenset({"feed_forward_length"})),
    "qwen35": Architecture("qwen3_5_text", RMS_SIZES | DELTA, DELTA_READS | SECTIONS, head_field=True, partial=True),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", {key: name for key, name in RMS_SIZES.items() if key != "feed_forward_length"}
        | QWEN_EXPERTS | SHARED_WIDTH | DELTA, DELTA_READS | SECTIONS, head_field=True, partial=True,
        unread=frozenset({"feed_forward_length"})),
    "seed_oss": Architecture("seed_oss", RMS_SIZES, head_field=True),
    "smollm3": Architecture("smollm3", RMS_SIZES, attention_bias="attention_bias", mlp_bias="mlp_bias"),
    "stablelm": Architecture("stablelm", SIZES | {LAYER_NORM: "layer_norm_eps"}, partial=True),
    "starcoder2": Architecture("starcoder2", SIZES | {LAYER_NORM: "norm_epsilon"}),
}
NEMOTRON = ARCHITECTURES["nemotron_h"]
ARCHITECTURES["nemotron_h_moe"] = Architecture(
    "nemotron_h", NEMOTRON.fields | ROUTED_EXPERTS | {  # type: ignore[operator]
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size"},
    NEMOTRON.reads | GROUPS | {"expert_weights_norm"}, {"expert_weights_scale": 0.0}, head_field=True, rotary=False)

# Files of Mixtral name the architecture llama, and experts.
MIXTRAL = Architecture("mixtral", RMS_SIZES | LOCAL_EXPERTS, head_field=True)
