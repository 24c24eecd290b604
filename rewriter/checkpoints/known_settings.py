"""The keys of a config's `quantization_config` that this release knows, for each method, in one place.

A key is in one of three groups. `scheme` obeys keys of the first, or the tensors show their effect: a module that was
left out has a plain weight. Records say how weights were quantized, and change no value. The others change the function
that a model computes, and have neutral values. A key of the last group with another value, and a key that is not listed
at all, is refused by name unless its value is empty: None, False, 0, "", [] or {}.

Sources: AutoGPTQ's BaseQuantizeConfig, GPTQModel's QuantizeConfig, AutoAWQ's AwqConfig, AutoRound's
SerializedCompressorConfig, transformers' GPTQConfig and AwqConfig, compressed-tensors' QuantizationConfig,
QuantizationScheme, QuantizationArgs and TransformConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Each key with the values that are accepted beside empty ones; None: any value.
Known = Mapping[str, tuple[Any, ...] | None]


def _any(names: str) -> dict[str, None]:
    return dict.fromkeys(names.split())


# How calibration went, which tool ran and how a runtime is to load the file.
_RECORDS: Known = _any("""
    act_data_type act_dynamic act_group_aware act_group_size act_sym amp auto_forward_data_parallel autoround_version
    batch_size cache_block_outputs calibration_data_device compute_device_filter damp_auto_increment damp_percent
    dataset dense_vram_strategy dense_vram_strategy_devices device disable_exllama do_fuse enable_minmax_tuning
    enable_norm_bias_tuning enable_quanted_input exllama_config fail_safe failsafe fallback foem fuse_max_seq_len
    gc_mode gptaq gradient_accumulate_steps hessian hyb_act iters low_gpu_mem_usage lr max_input_length meta minmax_lr
    model_dtype model_file_base_name model_name_or_path model_seqlen modules_to_fuse moe moe_vram_strategy
    moe_vram_strategy_devices mse nsamples offload_to_disk offload_to_disk_path pack_impl pad_token_id parallel_packing
    provider quantizer scale_dtype scale_search_chunked_activations seqlen static_attention_granularity static_groups
    static_kv_granularity supported_types tokenizer true_sequential use_cuda_fp16 use_exllama uri v2 v2_alpha
    v2_memory_device vram_strategy wait_for_submodule_finalizers
""")
# Which modules were quantized: the others have plain weights in the file.
_MODULES: Known = _any("""
    block_name_to_quantize dynamic lm_head module_name_preceding_first_block modules_in_block_to_quantize
    modules_to_not_convert quant_block_list to_quant_block_names
""")
_COMMON: Known = {
    **_RECORDS, **_MODULES, **_any("bits group_size quant_method sym"),
    "act_bits": (16, 32),  # of activations: none is quantized
    "data_type": ("int",),
    "pack_dtype": ("int32", "torch.int32"),
}
GPTQ: Known = {
    **_COMMON, **_any("backend checkpoint_format desc_act format"),  # groups lie as g_idx says
    "method": ("gptq",),
}
AWQ: Known = {
    **_COMMON, **_any("backend format version zero_point"),
    "checkpoint_format": ("gemm",), "method": ("awq",),
}
AUTO_ROUND: Known = {
    **_COMMON, **_any("backend desc_act extra_config packing_format quantized_lm_head super_bits super_group_size"),
}
MXFP4: Known = _any("dequantize modules_to_not_convert quant_method")
FP8: Known = {
    **_any("""activation_scheme dequantize ignored_layers kv_cache_scheme modules_to_convert modules_to_not_convert
              quant_method scale_fmt weight_block_size"""),
    "expert_dtype": ("fp8",), "fmt": ("e4m3",), "weight_per_tensor": (True,),
}
FBGEMM: Known = _any("activation_scale_ub modules_to_not_convert quant_method")
MODELOPT: Known = _any("""
    config_groups exclude_modules group_size ignore kv_cache_quant_algo kv_cache_scheme producer quant_algo quant_method
    quantized_layers
""")
QUARK: Known = _any("""
    exclude export global_quant_config kv_cache_post_rope kv_cache_quant_config layer_quant_config
    layer_type_quant_config quant_method quant_mode version
""")
MLX: Known = {**_any("bits group_size quant_method"), "mode": ("affine", "mxfp4", "mxfp8", "nvfp4")}
BITSANDBYTES: Known = _any("""
    _load_in_4bit bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type bnb_4bit_use_double_quant
    llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_skip_modules llm_int8_threshold load_in_4bit
    _load_in_8bit load_in_8bit quant_method
""")
BITNET: Known = {
    **_any("linear_class modules_to_not_convert quant_method rms_norm_eps"), "quantization_mode": ("offline",),
}
HQQ: Known = _any("quant_config quant_method skip_modules")
HQQ_PARTS: Known = _any("offload_meta weight_quant_params")
HQQ_WEIGHTS: Known = _any("axis channel_wise group_size nbits optimize round_zero view_as_float")
TORCHAO: Known = _any("""
    include_input_output_embeddings modules_to_not_convert quant_method quant_type quant_type_kwargs
    untie_embedding_weights
""")
# What a pattern of `dynamic` may set for the modules that it matches.
OVERRIDE: Known = {**_RECORDS, **_any("bits desc_act group_size sym"), "data_type": ("int",)}
COMPRESSED: Known = {
    **_any("""config_groups dequantize format global_compression_ratio ignore kv_cache_scheme provider quant_method
              quantization_status run_compressed use_optimized_inference version"""),
    "sparsity_config": None, "transform_config": None,  # by `_sparsity` and `_transform`
}
COMPRESSED_GROUP: Known = {
    **_any("format input_activations targets weights"),  # `scheme` knows the formats
}
COMPRESSED_WEIGHTS: Known = _any("""
    actorder group_size num_bits observer observer_kwargs scale_dtype strategy symmetric type zp_dtype
""")
# Where compressed-tensors applies a transform: to stored weights, before they were written.
_OFFLINE = ("weight_input", "weight_output")


def unknown_setting(settings: Mapping[str, Any], known: Known, where: str = "") -> str:
    """Name the first key that is neither known nor empty, with its value; "" where there is none.

    Args:
        settings: The object that holds the keys.
        known: One of the tables of this module.
        where: A prefix of the key's name, as in "dynamic[...].".
    """
    for key, value in settings.items():
        if value in (None, False, "", [], {}):
            continue
        accepted = known.get(key, ())
        if accepted is not None and value not in accepted:
            return f"{where}{key if key.isidentifier() else _short(key)} = {_short(value)}"
    return ""


def unknown_compressed(settings: Mapping[str, Any], blocks: bool = False) -> str:
    """`unknown_setting` of a compressed-tensors config as a whole; `blocks`: weights may have a block_structure."""
    weights = {**COMPRESSED_WEIGHTS, "block_structure": None} if blocks else COMPRESSED_WEIGHTS
    found = unknown_setting(settings, COMPRESSED) or _sparsity(settings.get("sparsity_config") or {}) or _transform(
        settings.get("transform_config") or {})
    for group in settings["config_groups"].values():
        found = found or unknown_setting(group, COMPRESSED_GROUP, "config_groups: ") or unknown_setting(
            group["weights"], weights, "config_groups: weights.")
    return found


def _sparsity(settings: Mapping[str, Any]) -> str:
    form = settings.get("format", "dense")
    return "" if form == "dense" else f"sparsity_config.format = {_short(form)}"


def _transform(settings: Mapping[str, Any]) -> str:
    """A transform of activations, which a model computes at each step. Transforms of weights are in the file."""
    found = unknown_setting(settings, {"config_groups": None}, "transform_config.")
    for group in (settings.get("config_groups") or {}).values():
        for each in group.get("apply") or ():
            if each["location"] not in _OFFLINE:
                found = found or f"transform_config, a {_short(group.get('type'))} at {_short(each['location'])}"
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
