"""The metadata keys of a GGUF file that decide what its model computes, by architecture.

This is the one table of them. A key of the architecture is obeyed; one that llama.cpp reads for other architectures is
refused unless its value changes nothing; any other key is passed over with a warning.

Source: `load_hparams` and each architecture's `load_arch_hparams` in llama.cpp, src/llama-model.cpp and src/models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

RMS, LAYER_NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
WINDOW, PATTERN, WINDOW_BASE = "attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"
ATTENTION_CAP, FINAL_CAP = "attn_logit_softcapping", "final_logit_softcapping"
WIDTH, VALUE_WIDTH = "attention.key_length", "attention.value_length"
DIMENSIONS, BASE = "rope.dimension_count", "rope.freq_base"
SCALING, FACTOR, OLD_FACTOR = "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"
ORIGINAL_CONTEXT, ATTENTION_FACTOR = "rope.scaling.original_context_length", "rope.scaling.attn_factor"
VOCABULARY = "vocab_size"

# The config field of transformers that each key sets, in all architectures but GPT-2.
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
GPT2_SIZES = {
    "block_count": "n_layer",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
}
HEADS = frozenset({WIDTH, VALUE_WIDTH, VOCABULARY})
ROPE = frozenset({DIMENSIONS, BASE, SCALING, FACTOR, OLD_FACTOR, ORIGINAL_CONTEXT, ATTENTION_FACTOR})


@dataclass(frozen=True)
class Architecture:
    """How one of GGUF's architectures becomes a model of transformers.

    Attributes:
        model_type: the name that transformers gives to the architecture.
        fields: the config field that each key sets; each key must be there unless `defaults` has it.
        reads: keys that `gguf_config` turns into fields in ways of their own.
        defaults: the value that llama.cpp takes for an absent key.
        head_field: whether the config states the width of heads; otherwise it follows from width and heads.
        partial: whether a part of each head's channels may be rotated.
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
    attention_bias: str = ""
    mlp_bias: str = ""
    constants: Mapping[str, object] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()


EXPERTS = {"expert_used_count": "num_experts_per_tok"}
QWEN_EXPERTS = EXPERTS | {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"}
ARCHITECTURES: dict[str, Architecture] = {
    "gemma2": Architecture(
        "gemma2", SIZES | {RMS: "rms_norm_eps", ATTENTION_CAP: "attn_logit_softcapping",
                           FINAL_CAP: "final_logit_softcapping", WINDOW: "sliding_window"},
        HEADS | ROPE | {PATTERN, WINDOW_BASE},
        {ATTENTION_CAP: 50.0, FINAL_CAP: 30.0, WINDOW: 4096, PATTERN: 2}, head_field=True,
        attention_bias="attention_bias"),
    "gemma3": Architecture(
        "gemma3_text", SIZES | {RMS: "rms_norm_eps", FINAL_CAP: "final_logit_softcapping", WINDOW: "sliding_window"},
        HEADS | ROPE | {PATTERN, WINDOW_BASE},
        {FINAL_CAP: 0.0, WINDOW: 0, PATTERN: 6, WINDOW_BASE: 10000.0}, head_field=True,
        attention_bias="attention_bias"),
    "gpt2": Architecture("gpt2", GPT2_SIZES | {LAYER_NORM: "layer_norm_epsilon"}, HEADS | {"attention.head_count_kv"}),
    "llama": Architecture("llama", SIZES | {RMS: "rms_norm_eps"}, head_field=True, attention_bias="attention_bias",
                          mlp_bias="mlp_bias"),
    "nemotron": Architecture("nemotron", SIZES | {LAYER_NORM: "norm_eps"}, head_field=True, partial=True,
                             attention_bias="attention_bias", mlp_bias="mlp_bias"),
    # llama.cpp reads the window of Phi3 and leaves it out, with a warning; the model was trained with it
    "phi3": Architecture("phi3", SIZES | {RMS: "rms_norm_eps", WINDOW: "sliding_window"}, defaults={WINDOW: 0},
                         partial=True),
    "qwen2": Architecture("qwen2", SIZES | {RMS: "rms_norm_eps"}, head_field=True),
    "qwen2moe": Architecture(
        "qwen2_moe", SIZES | QWEN_EXPERTS | {
            RMS: "rms_norm_eps", "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        constants={"norm_topk_prob": False}, unread=frozenset({"feed_forward_length"})),
    "qwen3": Architecture("qwen3", SIZES | {RMS: "rms_norm_eps"}, head_field=True, attention_bias="attention_bias"),
    "qwen3moe": Architecture(
        "qwen3_moe", SIZES | QWEN_EXPERTS | {RMS: "rms_norm_eps"}, head_field=True, attention_bias="attention_bias",
        constants={"norm_topk_prob": True}, unread=frozenset({"feed_forward_length"})),
    "stablelm": Architecture("stablelm", SIZES | {LAYER_NORM: "layer_norm_eps"}, partial=True),
    "starcoder2": Architecture("starcoder2", SIZES | {LAYER_NORM: "norm_epsilon"}),
}

# Files of Mixtral name the architecture llama, and experts.
MIXTRAL = Architecture(
    "mixtral", SIZES | EXPERTS | {RMS: "rms_norm_eps", "expert_count": "num_local_experts"}, head_field=True)

# Keys that llama.cpp reads for some architecture, by the values that leave the model as it is. Those of `reads` and
# `fields` are excepted.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "router_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "n_deepstack_layers": (0,),
    "rope.dimension_sections": (),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 0),
    "swin_norm": (False,),
}

# Keys that change no logits: notes of a converter, settings of pooling and of a scaling that is refused by its type,
# and a norm of the other kind.
HARMLESS = frozenset({
    RMS, LAYER_NORM, "pooling_type", "rope.scaling.finetuned", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_log_multiplier", "tensor_data_layout", "use_parallel_residual",
})
# Sizes of heads and rotations in layers with a window: they must be those of the other layers.
SAME_IN_WINDOWS = {
    "attention.key_length_swa": WIDTH, "attention.value_length_swa": WIDTH, "rope.dimension_count_swa": DIMENSIONS,
}
