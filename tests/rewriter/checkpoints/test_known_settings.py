"""Keys of quantization_config: those of published checkpoints open, and no other setting is passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quantized_folders import settings

from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.scheme import (
    METHODS,
    Scheme,
    quantization_settings,
    read_scheme,
    without_quantization,
)

AUTOGPTQ = {
    "bits": 4, "group_size": 128, "damp_percent": 0.1, "desc_act": False, "static_groups": False, "sym": True,
    "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model", "quant_method": "gptq",
    "checkpoint_format": "gptq",
}
# Of optimum and transformers, with all that GPTQConfig.to_dict writes.
TRANSFORMERS_GPTQ = {
    "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.1,
    "dataset": "wikitext2", "desc_act": False, "exllama_config": {"version": 1}, "group_size": 128,
    "max_input_length": None, "model_seqlen": 2048, "module_name_preceding_first_block": None,
    "modules_in_block_to_quantize": [["self_attn.q_proj"]], "pad_token_id": None, "quant_method": "gptq", "sym": True,
    "tokenizer": "org/model", "true_sequential": True, "use_cuda_fp16": False, "use_exllama": True, "backend": "auto",
    "act_group_aware": True, "format": "gptq", "checkpoint_format": "gptq", "meta": {"quantizer": ["optimum:1.24"]},
}
GPTQMODEL = {
    "bits": 4, "checkpoint_format": "gptq", "desc_act": True, "format": "gptq", "group_size": 128, "lm_head": False,
    "method": "gptq", "meta": {"damp_auto_increment": 0.01, "damp_percent": 0.05, "mse": 0.0, "gptaq": None,
                               "quantizer": ["gptqmodel:4.2.5"], "static_groups": False, "true_sequential": True,
                               "uri": "https://github.com/modelcloud/gptqmodel"},
    "pack_dtype": "int32", "quant_method": "gptq", "sym": True, "dynamic": {"-:.*shared_expert.*": {}},
}
AUTOROUND = {
    "amp": True, "autoround_version": "0.4.2", "batch_size": 8, "bits": 4, "damp_percent": 0.01, "data_type": "int",
    "desc_act": False, "enable_minmax_tuning": True, "enable_norm_bias_tuning": False, "enable_quanted_input": True,
    "gradient_accumulate_steps": 1, "group_size": 128, "iters": 1000, "low_gpu_mem_usage": False, "lr": 0.001,
    "minmax_lr": 0.001, "nsamples": 512, "provider": "auto-round", "quant_method": "gptq",
    "seqlen": 2048, "sym": True, "to_quant_block_names": None, "true_sequential": False, "act_bits": 16,
    "act_data_type": "int", "act_dynamic": True, "act_group_size": 128, "act_sym": True, "scale_dtype": "torch.float16",
}
AUTOAWQ = {"bits": 4, "group_size": 128, "modules_to_not_convert": ["visual"], "quant_method": "awq",
           "version": "gemm", "zero_point": True}
TRANSFORMERS_AWQ = AUTOAWQ | {"backend": "autoawq", "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None,
                              "modules_to_fuse": None, "modules_to_not_convert": None, "version": "GEMM"}
GPTQMODEL_AWQ = {"bits": 4, "checkpoint_format": "gemm", "desc_act": False, "format": "gemm", "group_size": 128,
                 "lm_head": False, "meta": {"quantizer": ["gptqmodel:5.6"]}, "method": "awq", "pack_dtype": "int32",
                 "quant_method": "awq", "version": "gemm", "zero_point": True, "sym": True}
LLM_COMPRESSOR = {
    "config_groups": {"group_0": {
        "format": "pack-quantized", "input_activations": None, "output_activations": None, "targets": ["Linear"],
        "weights": {"actorder": "weight", "block_structure": None, "dynamic": False, "group_size": 128, "num_bits": 4,
                    "observer": "minmax", "observer_kwargs": {}, "scale_dtype": None, "strategy": "group",
                    "symmetric": True, "type": "int", "zp_dtype": None}}},
    "format": "pack-quantized", "global_compression_ratio": 1.89, "ignore": ["lm_head", "re:.*gate"],
    "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "frozen",
    "sparsity_config": {}, "transform_config": {}, "version": "0.13.0",
}
FP8_KV = {
    "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": {"num_bits": 8, "type": "float"},
                                  "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}},
    "format": "float-quantized", "ignore": ["lm_head"], "quant_method": "compressed-tensors",
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True, "strategy": "tensor"},
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "producer": {"name": "modelopt"},
            "kv_cache_scheme": {"num_bits": 8, "type": "float"}, "ignore": ["lm_head"], "quantized_layers": {
                "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}, "x": {"quant_algo": "FP8"}}}
HF_QUANT_CONFIG = {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": {
    "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}}
QUARK = {"quant_method": "quark", "algo_config": None, "exclude": ["lm_head"], "export": {"pack_method": "reorder"},
         "global_quant_config": {"bias": None, "weight": {"dtype": "fp4", "group_size": 32, "scale_format": "e8m0",
                                                          "qscheme": "per_group"}}, "quant_mode": "eager_mode",
         "layer_quant_config": {}, "softmax_quant_spec": None, "version": "0.13"}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
AUTO_ROUND = {"quant_method": "auto-round", "autoround_version": "0.16.1", "bits": 4, "group_size": 128, "sym": True,
              "block_name_to_quantize": "model.layers", "data_type": "int", "enable_quanted_input": False,
              "packing_format": "auto_round:auto_gptq", "extra_config": {"lm_head": {"bits": 16, "data_type": "fp"}}}
MLX = {"quant_method": "mlx", "group_size": 64, "bits": 4, "mode": "affine", "model.layers.0.mlp.up_proj": {
    "group_size": 32, "bits": 8}, "lm_head": False}
DENSE = {"format": "dense", "global_sparsity": 0.13, "registry_requires_subclass": False,
         "sparsity_structure": "unstructured"}


def transform(*locations: str) -> dict[str, Any]:
    """A transform_config as llm-compressor writes it."""
    applied = [{"targets": ["re:.*down_proj$"], "location": at, "inverse": False, "ignore": []} for at in locations]
    return {"config_groups": {"R4": {"type": "hadamard", "apply": applied, "randomize": False, "requires_grad": False,
                                     "head_dim": None, "precision": "torch.float32"}}}


@pytest.mark.parametrize("said", [
    AUTOGPTQ, TRANSFORMERS_GPTQ, GPTQMODEL, AUTOROUND, AUTOAWQ, TRANSFORMERS_AWQ, GPTQMODEL_AWQ, LLM_COMPRESSOR,
    LLM_COMPRESSOR | {"sparsity_config": DENSE}, LLM_COMPRESSOR | {"transform_config": transform("weight_output")},
], ids=["autogptq", "optimum", "gptqmodel", "autoround", "autoawq", "transformers awq", "gptqmodel awq",
        "llm-compressor", "dense sparsity", "fused transform"])
def test_settings_of_published_checkpoints_are_read(said: dict[str, Any]) -> None:
    found = read_scheme(said, Path("model"))
    assert isinstance(found, Scheme) and (found.method, *found.layouts[0][:2]) == (said["quant_method"], 4, 128)


@pytest.mark.parametrize("said", [FP8_KV, MODELOPT, HF_QUANT_CONFIG, QUARK, FBGEMM, AUTO_ROUND, MLX, {
    **LLM_COMPRESSOR, "format": "mixed-precision", "config_groups": {
        "a": {**FP8_KV["config_groups"]["group_0"], "format": "float-quantized"},  # type: ignore[index]
        "b": LLM_COMPRESSOR["config_groups"]["group_0"]}}])  # type: ignore[index]
def test_settings_of_other_tools_are_read(said: dict[str, Any]) -> None:
    found = read_scheme(said, Path("model"))
    words = [layout[:2] for layout in found.layouts]
    assert words == ([(4, 128)] if said in (AUTO_ROUND,) or "mixed-precision" in said.values() else [])
    assert bool(found.coded) == (said != AUTO_ROUND)


@pytest.mark.parametrize("value", [True, 1, 0.5, "hadamard", [1], {"a": 1}])
@pytest.mark.parametrize("method", METHODS)
def test_a_setting_that_nobody_knows_is_refused_by_name(method: str, value: object) -> None:
    said = settings(method, 4, 128, True) | {"new_rotation": value}
    of = ".a" if method == "mlx" and isinstance(value, dict) else ""  # where an object is that of a module
    with pytest.raises(CheckpointError, match=f"quantized by {method} with new_rotation{of} = "):
        read_scheme(said, Path("model"))


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
@pytest.mark.parametrize("method", METHODS)
def test_an_empty_setting_changes_nothing(method: str, value: object) -> None:
    said = settings(method, 4, 128, True)
    assert read_scheme(said | {"new_rotation": value}, Path("model")) == read_scheme(said, Path("model"))


@pytest.mark.parametrize(("said", "change", "name"), [
    (GPTQMODEL, {"rotation": "hadamard"}, "rotation = 'hadamard'"),
    (GPTQMODEL, {"adapter": {"name": "lora", "rank": 64}}, "adapter = "),
    (GPTQMODEL, {"pack_dtype": "int16"}, "pack_dtype = 'int16'"),
    (GPTQMODEL, {"checkpoint_format": "gptq_p", "format": "gptq_p"}, "checkpoint_format 'gptq_p'"),
    (GPTQMODEL, {"checkpoint_format": "gptq_v2"}, "checkpoint_format 'gptq' and 'gptq_v2'"),
    (GPTQMODEL, {"dynamic": {"+:.*up": {"adapter": {"rank": 8}}}}, r"dynamic\['\+:\.\*up'\]\.adapter = "),
    (GPTQMODEL, {"dynamic": {".*up": {"bits": 3}}}, "gptq of 3 bits"),
    (GPTQMODEL, {"dynamic": {".*up": {"group_size": 16}}}, "gptq in groups of 16"),
    (GPTQMODEL, {"dynamic": ["up"]}, "lacks what that needs"),
    (GPTQMODEL, {"sym": "yes"}, "sym must be true or false, found 'yes'"),
    (AUTOGPTQ, {"is_marlin_format": True}, "is_marlin_format = True"),
    (AUTOROUND, {"act_bits": 8}, "act_bits = 8"), (AUTOROUND, {"data_type": "mx_fp"}, "data_type = 'mx_fp'"),
    (AUTOAWQ, {"backend": "llm-awq"}, "'llm-awq'"), (AUTOAWQ, {"format": "gemv_fast"}, "awq in format 'gemv_fast'"),
    (AUTOAWQ, {"desc_act": True}, "desc_act = True"),
    (LLM_COMPRESSOR, {"transform_config": transform("input")}, "transform_config, a 'hadamard' at 'input'"),
    (LLM_COMPRESSOR, {"transform_config": transform("weight_input", "output")}, "transform_config, .* at 'output'"),
    (LLM_COMPRESSOR, {"transform_config": {"scale": 2}}, "transform_config.scale = 2"),
    (LLM_COMPRESSOR, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format = 'sparse-24"),
    (LLM_COMPRESSOR, {"config_groups": {}}, "config_groups is empty"),
    (MODELOPT, {"quant_algo": "NVFP4_AWQ"}, "modelopt with quant_algo 'NVFP4_AWQ'; FP8,"),
    (MODELOPT, {"quantized_layers": {"x": {"quant_algo": "W4A8_AWQ"}}}, "quant_algo 'W4A8_AWQ'"),
    (MODELOPT, {"pre_quant_scale": True}, "pre_quant_scale = True"),
    (QUARK, {"algo_config": [{"name": "rotation"}]}, "algo_config = "),
    (QUARK, {"global_quant_config": {"weight": {"dtype": "int4", "group_size": 128}}}, "weights of 'int4' in groups"),
    (QUARK, {"layer_quant_config": {"x": {"weight": {"dtype": "fp4", "group_size": 16}}}}, "'fp4' in groups of 16"),
    (QUARK, {"global_quant_config": {"bias": {"dtype": "int8"}}}, "quantized biases"),
    (AUTO_ROUND, {"packing_format": "auto_round:fp8"}, "packing_format 'auto_round:fp8'; auto_gptq"),
    (AUTO_ROUND, {"act_bits": 8}, "act_bits = 8"),
    (AUTO_ROUND, {"extra_config": {"x": {"bits": 2}}}, "of 2 bits"),
    (MLX, {"mode": "int3"}, "mode = 'int3'"), (MLX, {"x": {"dense": 2}}, "x.dense = 2"),
    (FP8_KV, {"format": "sparse-24"}, "format 'sparse-24'"),
])
def test_a_setting_that_changes_the_function_is_refused_by_name(
    said: dict[str, Any], change: dict[str, Any], name: str
) -> None:
    read_scheme(said, Path("model"))
    with pytest.raises(CheckpointError, match=name):
        read_scheme(said | change, Path("model"))


@pytest.mark.parametrize(("where", "change", "name"), [
    ("group", {"output_activations": {"num_bits": 8}}, "config_groups: output_activations = "),
    ("group", {"format": "marlin-24"}, "compressed-tensors in format 'marlin-24'"),
    ("group", {"format": "int-quantized", "weights": {"type": "int", "num_bits": 9}}, "9 bits of type 'int'; int of 2"),
    ("group", {"format": "mxfp8-quantized"}, "'mxfp8-quantized' of 4 bits of type 'int'; symmetric floats of 8"),
    ("weights", {"dynamic": True}, "config_groups: weights.dynamic = True"),
    ("weights", {"block_structure": [16, 16]}, "config_groups: weights.block_structure = "),
])
def test_settings_of_a_group_are_refused_by_name(where: str, change: dict[str, Any], name: str) -> None:
    said = json.loads(json.dumps(LLM_COMPRESSOR))
    group = said["config_groups"]["group_0"]
    (group if where == "group" else group["weights"]).update(change)
    with pytest.raises(CheckpointError, match=name):
        read_scheme(said, Path("model"))


def test_settings_lie_where_each_tool_puts_them(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({
        key: value for key, value in HF_QUANT_CONFIG.items() if key != "quant_method"}))
    assert quantization_settings(tmp_path) == HF_QUANT_CONFIG
    plain = {key: value for key, value in MLX.items() if key != "quant_method"}
    config.write_text(json.dumps({"quantization": plain, "quantization_config": plain}))  # mlx_lm writes both
    assert quantization_settings(tmp_path) == MLX
    without_quantization(config)
    assert quantization_settings(tmp_path) is None


def test_settings_that_are_no_object_are_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": ["gptq"]}))
    with pytest.raises(CheckpointError, match="quantization_config must be an object, found list"):
        quantization_settings(tmp_path)
