"""Models quantized and saved by other libraries, each file with the values that its library gives back.

A kind is a function of the folder of a model and of the one to be made; it returns the model in float32 with the
library's own values. BitNet's are those of transformers' `unpack_weights`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, CompressedTensorsConfig, TorchAoConfig

Write = Callable[[Path, Path], Any]
PARTS = ("self_attn", "mlp")  # modules whose matrices are quantized


def read_model(folder: Path, **how: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu", **how).eval()


def matrices(model: Any) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and name.rpartition(".")[0].endswith(PARTS)}


def by_bitsandbytes(folder: Path, out: Path, **config: Any) -> Any:
    read_model(folder, quantization_config=BitsAndBytesConfig(**config)).save_pretrained(out)
    return read_model(out).dequantize()


def by_torchao(folder: Path, out: Path, config: str, *given: Any) -> Any:
    from torchao import quantization

    read_model(folder, quantization_config=TorchAoConfig(getattr(quantization, config)(*given))).save_pretrained(out)
    model = read_model(out)
    for module in matrices(model).values():
        module.weight = nn.Parameter(module.weight.dequantize(), requires_grad=False)
    return model


def by_compressed_tensors(folder: Path, out: Path, preset: str) -> Any:
    """With scales of each group's, block's, row's or matrix's largest magnitude."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model, scheme = read_model(folder), preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for module in matrices(model).values():
        rows, columns = scheme.weights.block_structure or (1, scheme.weights.group_size or module.in_features)
        if scheme.weights.strategy == "tensor":
            rows, columns = module.weight.shape
        padding = 0, -module.in_features % columns, 0, -module.out_features % rows
        most = nn.functional.pad(module.weight.abs(), padding).unflatten(1, (-1, columns)).unflatten(
            0, (-1, rows)).amax((1, 3))
        if over := scheme.weights.strategy == "tensor_group":
            module.weight_global_scale.data = generate_gparam(-most.max(), most.max())
        scale, _ = calculate_qparams(-most, most, scheme.weights, module.weight_global_scale if over else None)
        module.weight_scale.data = scale.to(module.weight_scale.dtype).view_as(module.weight_scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)
    return read_model(out, quantization_config=CompressedTensorsConfig(dequantize=True))


def save_tensors(
    folder: Path, out: Path, settings: dict[str, Any], quantize: Callable[[nn.Linear], tuple[dict[str, Any], Any]]
) -> Any:
    """Save what `quantize` makes of each matrix, its parts and the values they stand for."""
    model = read_model(folder)
    model.save_pretrained(out)
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name, module in matrices(model).items():
        parts, module.weight.data = quantize(module)
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return model


def by_hqq(folder: Path, out: Path) -> Any:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    def quantize(module: nn.Linear) -> tuple[dict[str, Any], Any]:
        made = HQQLinear(module, BaseQuantizeConfig(nbits=4, group_size=64, axis=1), compute_dtype=torch.float32,
                         device="cpu", del_orig=False)
        return made.state_dict(), made.dequantize().reshape(module.weight.shape)

    return save_tensors(folder, out, {"quant_method": "hqq", "quant_config": {}, "skip_modules": ["lm_head"]}, quantize)


def by_bitnet(folder: Path, out: Path) -> Any:
    from transformers.integrations.bitnet import pack_weights, unpack_weights

    def quantize(module: nn.Linear) -> tuple[dict[str, Any], Any]:
        scale = 1 / module.weight.data.abs().mean().view(1)  # of BitNet b1.58, section 2; it divides
        packed = pack_weights((module.weight.data * scale).round().clamp(-1, 1))
        return {"weight": packed, "weight_scale": scale}, unpack_weights(packed, torch.float32) / scale

    with torch.compiler.set_stance("force_eager"):  # unpack_weights would be compiled
        return save_tensors(folder, out, {"quant_method": "bitnet", "linear_class": "bitlinear"}, quantize)


def seen_values(folder: Path, model: Any) -> dict[str, torch.Tensor]:
    """The weights that the matrices of a model multiply with, whose plain modules are in a folder."""
    with torch.no_grad():
        return {name: model.get_submodule(name)(torch.eye(module.in_features)).t().contiguous()
                for name, module in matrices(read_model(folder)).items()}


def with_values(folder: Path, values: dict[str, torch.Tensor]) -> Any:
    """The model of a folder with other weights in its modules."""
    model = read_model(folder)
    model.load_state_dict({f"{name}.weight": value for name, value in values.items()}, strict=False)
    return model


def by_mlx(folder: Path, out: Path, **asked: Any) -> Any:
    import mlx.core as mx
    from mlx_lm import utils

    model, config = utils.quantize_model(*utils.load_model(folder), **{"group_size": None, "bits": None, **asked})
    utils.save_model(out, model)
    utils.save_config(config, out / "config.json")
    values = {name: torch.tensor(mx.dequantize(
        module.weight, module.scales, module.get("biases"), module.group_size, module.bits, module.mode).astype(
            mx.float32).tolist()) for name, module in model.named_modules() if "scales" in module}
    return with_values(folder, values)


def by_modelopt(folder: Path, out: Path, preset: str, kind: str, blocks: int = 0) -> Any:
    from modelopt.torch import quantization
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization import qtensor

    model = read_model(folder)
    shapes = {name: module.weight.shape for name, module in matrices(model).items()}
    export_hf_checkpoint(quantization.quantize(model, getattr(quantization, preset), lambda model: model(
        torch.arange(8)[None])), export_dir=out)
    stored = load_file(out / "model.safetensors")
    return with_values(folder, {name: getattr(qtensor, kind)(shape, torch.float32, stored[f"{name}.weight"]).dequantize(
        scale=stored[f"{name}.weight_scale"], double_scale=stored.get(f"{name}.weight_scale_2"),
        **({"block_sizes": {-1: blocks}} if blocks else {})) for name, shape in shapes.items()})


def by_quark(folder: Path, out: Path, spec: str, **asked: Any) -> Any:
    from quark.torch import ModelQuantizer, export_safetensors
    from quark.torch.quantization.config import config

    weight = getattr(config, spec)(is_dynamic=False, **asked).to_quantization_spec()
    quantizer = ModelQuantizer(config.QConfig(config.QLayerConfig(weight=weight), exclude=["lm_head"]))
    model = quantizer.freeze(quantizer.quantize_model(read_model(folder), [torch.arange(8)[None]]))
    values = seen_values(folder, model)
    export_safetensors(model, out)
    return with_values(folder, values)


def by_auto_round(folder: Path, out: Path, **asked: Any) -> Any:
    """In words of GPTQ where it is symmetric, else of AWQ."""
    from auto_round import AutoRound
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model, letters = read_model(folder), Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    made = AutoRound(model, PreTrainedTokenizerFast(tokenizer_object=letters), iters=0, disable_opt_rtn=True,
                     device_map="cpu", **asked)
    made.quantize_and_save(str(out.with_name("made")), format="auto_round")
    next(out.with_name("made").iterdir()).rename(out)
    if asked.get("sym", True):
        return with_values(folder, seen_values(folder, read_model(out)))
    stored = load_file(out / "model.safetensors")
    return with_values(folder, {name: dequantize_gemm(
        stored[f"{name}.qweight"], stored[f"{name}.qzeros"], stored[f"{name}.scales"].float(), asked["bits"],
        asked["group_size"]).t() for name in matrices(read_model(folder))})


def _torchao_int4(folder: Path, out: Path) -> Any:
    from torchao.quantization.granularity import PerGroup

    return by_torchao(folder, out, "IntxWeightOnlyConfig", torch.int4, PerGroup(64))


def _kinds(library: str, write: Callable[..., Any], **kinds: dict[str, Any]) -> dict[str, tuple[str, Write]]:
    return {name.replace("_", " "): (library, functools.partial(write, **given)) for name, given in kinds.items()}


KINDS: dict[str, tuple[str, Write]] = {  # by name the library and the function
    **_kinds("compressed_tensors", by_compressed_tensors, fp8_tensors={"preset": "FP8"},
             fp8_rows={"preset": "FP8_DYNAMIC"}, fp8_blocks={"preset": "FP8_BLOCK"}, nvfp4={"preset": "NVFP4A16"},
             mxfp4={"preset": "MXFP4A16"}, mxfp8={"preset": "MXFP8"}, w8a8={"preset": "W8A8"}),
    **_kinds("bitsandbytes", by_bitsandbytes, nf4={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
             nf4_double={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
             fp4={"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, llm_int8={"load_in_8bit": True}),
    **_kinds("torchao", by_torchao, torchao_int8={"config": "Int8WeightOnlyConfig"},
             torchao_float8={"config": "Float8WeightOnlyConfig"}),
    **_kinds("mlx", by_mlx, mlx_4_bits={"bits": 4}, mlx_3_bits={"bits": 3, "group_size": 32}, mlx_8_bits={"bits": 8},
             **{f"mlx_{mode}": {"mode": mode} for mode in ("mxfp4", "nvfp4", "mxfp8")}),
    **_kinds("modelopt", by_modelopt, modelopt_fp8={"preset": "FP8_DEFAULT_CFG", "kind": "FP8QTensor"},
             modelopt_nvfp4={"preset": "NVFP4_DEFAULT_CFG", "kind": "NVFP4QTensor", "blocks": 16},
             modelopt_mxfp8={"preset": "MXFP8_DEFAULT_CFG", "kind": "MXFP8QTensor"}),
    **_kinds("quark", by_quark, quark_fp8={"spec": "FP8E4M3PerTensorSpec", "observer_method": "min_max"},
             quark_mxfp4={"spec": "OCP_MXFP4Spec", "ch_axis": -1}),
    **_kinds("auto_round", by_auto_round, auto_round={"bits": 4, "group_size": 64},
             auto_round_zeros={"bits": 4, "group_size": 64, "sym": False}),
    "torchao int4 g64": ("torchao", _torchao_int4), "hqq 4 bits g64": ("hqq", by_hqq),
    "bitnet": ("transformers", by_bitnet)}
