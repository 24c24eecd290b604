"""Keys of quantization_config: those of published checkpoints open, and no other setting is passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quantized_folders import settings

from forebay.rewriter.checkpoints.grouped import METHODS, Scheme, quantization_settings, read_scheme
from forebay.rewriter.checkpoints.records import CheckpointError

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


@pytest.mark.parametrize("value", [True, 1, 0.5, "hadamard", [1], {"a": 1}])
@pytest.mark.parametrize("method", METHODS)
def test_a_setting_that_nobody_knows_is_refused_by_name(method: str, value: object) -> None:
    said = settings(method, 4, 128, True) | {"new_rotation": value}
    with pytest.raises(CheckpointError, match=f"quantized by {method} with new_rotation = "):
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
    (LLM_COMPRESSOR, {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme = "),
    (LLM_COMPRESSOR, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format = 'sparse-24"),
    (LLM_COMPRESSOR, {"config_groups": {}}, "config_groups is empty"),
])
def test_a_setting_that_changes_the_function_is_refused_by_name(
    said: dict[str, Any], change: dict[str, Any], name: str
) -> None:
    read_scheme(said, Path("model"))
    with pytest.raises(CheckpointError, match=name):
        read_scheme(said | change, Path("model"))


@pytest.mark.parametrize(("where", "change", "name"), [
    ("group", {"output_activations": {"num_bits": 8}}, "config_groups: output_activations = "),
    ("group", {"format": "int-quantized"}, "config_groups: format = 'int-quantized'"),
    ("weights", {"dynamic": True}, "config_groups: weights.dynamic = True"),
    ("weights", {"block_structure": [16, 16]}, "config_groups: weights.block_structure = "),
])
def test_settings_of_a_group_are_refused_by_name(where: str, change: dict[str, Any], name: str) -> None:
    said = json.loads(json.dumps(LLM_COMPRESSOR))
    group = said["config_groups"]["group_0"]
    (group if where == "group" else group["weights"]).update(change)
    with pytest.raises(CheckpointError, match=name):
        read_scheme(said, Path("model"))


def test_settings_that_are_no_object_are_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": ["gptq"]}))
    with pytest.raises(CheckpointError, match="quantization_config must be an object, found list"):
        quantization_settings(tmp_path)
