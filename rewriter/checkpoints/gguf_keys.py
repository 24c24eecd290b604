"""The metadata keys of a GGUF file that decide what its model computes, by architecture.

A key of the architecture is obeyed; one that llama.cpp reads for other architectures is refused unless its value
changes nothing; any other key is passed over with a warning.

Source: `load_hparams` and each architecture's `load_arch_hparams` in llama.cpp, src/llama-model.cpp and src/models.
"""

from __future__ import annotations

RMS, LAYER_NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
WINDOW, PATTERN, WINDOW_BASE = "attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"
ATTENTION_CAP, FINAL_CAP = "attn_logit_softcapping", "final_logit_softcapping"
WIDTH, VALUE_WIDTH = "attention.key_length", "attention.value_length"
DIMENSIONS, BASE = "rope.dimension_count", "rope.freq_base"
SCALING, FACTOR, OLD_FACTOR = "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"
ORIGINAL_CONTEXT, ATTENTION_FACTOR = "rope.scaling.original_context_length", "rope.scaling.attn_factor"
VOCABULARY = "vocab_size"
KV_HEADS, LEADING_DENSE, NEXTN = "attention.head_count_kv", "leading_dense_block_count", "nextn_predict_layers"
FINETUNED = "rope.scaling.finetuned"  # Granite's switch: whether anything is rotated
SSM_GROUPS = "ssm.group_count"
SHARED_KV, PER_LAYER, SPARSITY = "attention.shared_kv_layers", "embedding_length_per_layer_input", (
    "activation_sparsity_scale")
WINDOW_WIDTH, WINDOW_VALUE_WIDTH = "attention.key_length_swa", "attention.value_length_swa"
WINDOW_DIMENSIONS = "rope.dimension_count_swa"
YARN_FAST, YARN_SLOW = "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"

# The config field of transformers that each key sets, in all architectures but GPT-2.
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    KV_HEADS: "num_key_value_heads",
}
GPT2_SIZES = {
    "block_count": "n_layer",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
}
HEADS = frozenset({WIDTH, VALUE_WIDTH, VOCABULARY})
ROPE = frozenset({DIMENSIONS, BASE, SCALING, FACTOR, OLD_FACTOR, ORIGINAL_CONTEXT, ATTENTION_FACTOR, YARN_FAST,
                  YARN_SLOW})
GROUPS = frozenset({"expert_group_count", "expert_group_used_count"})
SSM = {"ssm.conv_kernel": "conv_kernel", "ssm.state_size": "ssm_state_size", "ssm.time_step_rank": "mamba_num_heads",
       SSM_GROUPS: "n_groups"}

# Keys that llama.cpp reads for some architecture, by the values that leave the model as it is. Those of `reads` and
# `fields` are excepted.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.scale": (0,),
    SHARED_KV: (0,),
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
    NEXTN: (0,),
    "n_deepstack_layers": (0,),
    "rope.dimension_sections": (),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 0, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "swin_norm": (False,),
}

# Keys that change no logits: notes of a converter, settings of pooling, and a norm of the other kind.
HARMLESS = frozenset({
    RMS, LAYER_NORM, "pooling_type", FINETUNED, "tensor_data_layout", "use_parallel_residual",
})
# Sizes of heads and rotations in layers with a window: they must be those of the other layers.
SAME_IN_WINDOWS = {
    WINDOW_WIDTH: WIDTH, WINDOW_VALUE_WIDTH: WIDTH, WINDOW_DIMENSIONS: DIMENSIONS,
}
