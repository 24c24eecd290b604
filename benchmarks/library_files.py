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
from safetensors.torch import save_file
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


def _torchao_int4(folder: Path, out: Path) -> Any:
    from torchao.quantization.granularity import PerGroup

    return by_torchao(folder, out, "IntxWeightOnlyConfig", torch.int4, PerGroup(64))


def _kinds(library: str, write: Callable[..., Any], **kinds: dict[str, Any]) -> dict[str, tuple[str, Write]]:
    return {name.replace("_", " "): (library, functools.partial(write, **given)) for name, given in kinds.items()}


KINDS: dict[str, tuple[str, Write]] = {  # by name the library and the function
    **_kinds("compressed_tensors", by_compressed_tensors, fp8_tensors={"preset": "FP8"},
             fp8_rows={"preset": "FP8_DYNAMIC"}, fp8_blocks={"preset": "FP8_BLOCK"}, nvfp4={"preset": "NVFP4A16"},
             mxfp4={"preset": "MXFP4A16"}),
    **_kinds("bitsandbytes", by_bitsandbytes, nf4={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
             nf4_double={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
             fp4={"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, llm_int8={"load_in_8bit": True}),
    **_kinds("torchao", by_torchao, torchao_int8={"config": "Int8WeightOnlyConfig"},
             torchao_float8={"config": "Float8WeightOnlyConfig"}),
    "torchao int4 g64": ("torchao", _torchao_int4), "hqq 4 bits g64": ("hqq", by_hqq),
    "bitnet": ("transformers", by_bitnet)}
