"""Checkpoints of HQQ and torchao: written here element by element by their published layouts, and by the libraries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quantized_model import Written, write_quantized
from safetensors.torch import load_file, save_file

import forebay
from forebay.rewriter.checkpoints.checkpoint import read_metadata
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.packed import read_dequantized
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.resolve import resolve_model

IDS = torch.tensor([[5, 9, 2, 77, 31]])
SHAPE = dict(vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=False)
HQQ = {"quant_method": "hqq", "skip_modules": ["lm_head"], "quant_config": {
    "offload_meta": False, "weight_quant_params": {"nbits": 4, "channel_wise": True, "group_size": 64, "optimize": True,
                                                   "round_zero": False, "axis": 1, "view_as_float": False}}}
TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "AnyConfig"}}, "modules_to_not_convert": None}


def hqq(n: int, k: int, bits: int, group: int) -> Written:
    """Each code by itself into the field of its byte."""
    count = n * k // group
    codes, zero = torch.randint(0, 1 << bits, (count, group)), torch.rand(count, 1) * ((1 << bits) - 1)
    scale = torch.rand(count, 1) * 0.02 + 0.001
    scale, zero = scale.half(), zero.half()
    fields = 8 // bits
    packed = torch.zeros(count // fields, group, dtype=torch.uint8)
    for row in range(count):
        field = row // (count // fields)
        packed[row % (count // fields)] |= (codes[row] << (8 - bits - bits * field)).to(torch.uint8)
    parts = {"W_q": packed, "scale": scale, "zero": zero, "shape": torch.tensor([n, k]),
             "nbits": torch.tensor(bits, dtype=torch.int32), "axis": torch.tensor(1, dtype=torch.int32)}
    return parts, {}, ((codes - zero.double()) * scale.double()).view(n, k)


def int4(n: int, k: int, group: int) -> Written:
    codes = torch.randint(-8, 8, (n, k))
    scale, zero = (torch.rand(k // group, n) * 0.02 + 0.001).bfloat16(), (torch.randn(k // group, n) * 0.01).bfloat16()
    packed = (codes[:, 0::2] & 15 | (codes[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
    wide = [part.t().double().repeat_interleave(group, 1) for part in (scale, zero)]
    return ({"_weight_qdata": packed, "_weight_scale": scale, "_weight_zero_point": zero},
            {"_type": "Int4Tensor", "_data": {"block_size": [1, group], "shape": [n, k]}}, codes * wide[0] + wide[1])


def whole(n: int, k: int, group: int, zeros: bool, target: str = "") -> Written:
    """Int8Tensor, or IntxUnpackedToInt8Tensor of `target`."""
    most = 8 if target == "int4" else 128
    codes = torch.randint(-most, most, (n, k), dtype=torch.int8)
    scale = torch.rand(n, k // group) * 0.02 + 0.001
    zero = torch.randint(-most // 2, most // 2, (n, k // group), dtype=torch.int8) * zeros
    wide = [part.double().repeat_interleave(group, 1) for part in (scale, zero)]
    parts = {"_weight_qdata": codes, "_weight_scale": scale}
    data: dict[str, Any] = {"block_size": [1, group]}
    if target:
        data["target_dtype"] = {"_type": "torch.dtype", "_data": target}
    if zeros or target:
        parts["_weight_zero_point"] = zero
    return parts, {"_type": "IntxUnpackedToInt8Tensor" if target else "Int8Tensor", "_data": data}, (
        codes - wide[1]) * wide[0]


def float8(n: int, k: int, rows: int, columns: int) -> Written:
    codes = (torch.randn(n, k) * 50).to(torch.float8_e4m3fn)
    scale = torch.rand(n // rows, k // columns) * 0.002 + 1e-4
    wide = scale.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return ({"_weight_qdata": codes, "_weight_scale": scale},
            {"_type": "Float8Tensor", "_data": {"block_size": [rows, columns]}}, codes.double() * wide)


CASES: dict[str, tuple[dict[str, Any], Callable[[int, int], Written], str]] = {
    "hqq4": (HQQ, lambda n, k: hqq(n, k, 4, 64), "w4g64"), "hqq8": (HQQ, lambda n, k: hqq(n, k, 8, 128), "w8g128"),
    "hqq2": (HQQ, lambda n, k: hqq(n, k, 2, 32), "w4g32"), "int4": (TORCHAO, lambda n, k: int4(n, k, 32), "w4g32"),
    "int8": (TORCHAO, lambda n, k: whole(n, k, k, False), "w8g128s"),
    "int8z": (TORCHAO, lambda n, k: whole(n, k, 64, True), "w8g64"),
    "intx4": (TORCHAO, lambda n, k: whole(n, k, 32, True, "int4"), "w4g32"),
    "intx4s": (TORCHAO, lambda n, k: whole(n, k, 32, False, "int4"), "w4g32s"),
    "float8": (TORCHAO, lambda n, k: float8(n, k, 1, k), "fp8"),
    "float8b": (TORCHAO, lambda n, k: float8(n, k, 32, 32), "fp8g32")}


def write(folder: Path, case: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model in a folder as the tool saves it, the same in memory with the tool's values, and these by name."""
    settings, made, _ = CASES[case]
    return write_quantized(folder, SHAPE, settings, made)


@pytest.mark.parametrize("case", CASES)
def test_values_are_the_tools_and_the_model_runs_packed(tmp_path: Path, case: str) -> None:
    model, values = write(tmp_path / "model", case)
    folder = resolve_model(tmp_path / "model")
    stored = open_checkpoint(folder).tensors
    for name, value in values.items():
        packed = stored[name].packed
        assert packed is not None and packed.format == CASES[case][2]
        found, step = read_dequantized(stored[name]).double(), 2.0**-11
        # scale and low are rounded once, each by half of 2^-10 of itself; fp8 not at all
        bound = step * (value.abs().amax() + 2 * 255 * 0.021) if "float8" not in case else 1e-7
        assert (found - value).abs().max() <= bound
        assert (found - value).norm() <= (1e-3 if "float8" not in case else 1e-7) * value.norm()
    if case not in ("hqq4", "int8z"):
        return
    with torch.no_grad():
        expected = model(IDS).logits[0, -1]
    with forebay.wrap(tmp_path / "model", 1 << 28) as lm:
        got = lm.next_logits(IDS)[0]
    # a low of up to 192 steps that is rounded moves all of a group
    assert (got - expected).norm() < (2e-2 if case == "int8z" else 2e-3) * expected.norm()


@pytest.mark.parametrize(("case", "change", "message"), [
    ("hqq4", {"axis": torch.tensor(0, dtype=torch.int32)}, "groups along the outputs"),
    ("hqq4", {"nbits": torch.tensor(3, dtype=torch.int32)}, "codes of 3 bits"),
    ("hqq4", {"zero": torch.zeros(7, 1)}, "7 zero points"),
    ("hqq4", {"shape": torch.tensor([4])}, r"has shape \[4\]"),
    ("hqq4", {"scale": None}, "lacks scale"),
    ("hqq4", {"scale": torch.full((256, 1), torch.nan)}, "no finite number"),
    ("hqq4", {"group_size": torch.tensor(32, dtype=torch.int32)}, "not those of groups of 32"),
    ("int4", {"_weight_scale": torch.ones(3, 128)}, "zero points"),
    ("int4", {"_weight_act_pre_scale": torch.ones(1)}, "act_pre_scale"),
    ("int8", {"_weight_scale": torch.ones(3)}, "but has scales"),
    ("float8", {"_weight_scale": torch.ones(3)}, "for blocks of"),
])
def test_parts_that_do_not_fit_are_named(
    tmp_path: Path, case: str, change: dict[str, torch.Tensor | None], message: str
) -> None:
    write(tmp_path / "model", case)
    path = tmp_path / "model" / "model.safetensors"
    metadata, tensors = read_metadata(path), load_file(path)
    for part, tensor in change.items():
        name = f"model.layers.1.self_attn.q_proj.{part}"
        tensors.pop(name, None)
        tensors |= {} if tensor is None else {name: tensor}
    save_file(tensors, path, metadata)
    with pytest.raises(CheckpointError, match=message):
        resolve_model(tmp_path / "model")


@pytest.mark.parametrize(("settings", "message"), [
    (HQQ | {"rotated": True}, "rotated"),
    (HQQ | {"quant_config": {"weight_quant_params": {"nbits": "four"}}}, "lacks what that needs"),
    (TORCHAO | {"sparse": True}, "sparse"),
    (TORCHAO, "is a Int4TilePackedTo4dTensor of torchao"),
])
def test_what_is_not_known_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    write(tmp_path / "model", "int4")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    if settings is TORCHAO:
        file = tmp_path / "model" / "model.safetensors"
        about = json.dumps({"_type": "Int4TilePackedTo4dTensor", "_data": {}})
        tensors = load_file(file)
        save_file(tensors, file, {name.replace("_weight_qdata", "weight"): about for name in tensors})
    with pytest.raises(CheckpointError, match=message):
        resolve_model(tmp_path / "model")


def test_a_config_of_nulls_says_nothing(tmp_path: Path) -> None:
    write(tmp_path / "model", "hqq4")
    path = tmp_path / "model" / "config.json"
    params = {"weight_quant_params": {"nbits": None, "axis": None}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": HQQ | {"quant_config": params}}))
    assert resolve_model(tmp_path / "model").is_dir()


def test_blocks_that_end_within_a_row_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "model", "int8z")
    path = tmp_path / "model" / "model.safetensors"
    metadata, tensors = read_metadata(path), load_file(path)
    name = "model.layers.0.self_attn.q_proj.weight"  # [128, 128] in two blocks of 64 columns; of 96 it has two, too
    about = json.loads(metadata[name])
    about["_data"]["block_size"] = [1, 96]
    save_file(tensors, path, metadata | {name: json.dumps(about)})
    with pytest.raises(CheckpointError, match=r"q_proj.weight is \[128, 128\] in blocks of \[1, 96\]"):
        resolve_model(tmp_path / "model")


@pytest.mark.parametrize(("bits", "group"), [(8, 128), (4, 64), (2, 32)])
def test_files_of_hqq_itself(tmp_path: Path, bits: int, group: int) -> None:
    quantize = pytest.importorskip("hqq.core.quantize")
    write(tmp_path / "model", "hqq4")
    path = tmp_path / "model" / "model.safetensors"
    tensors, values = {k: v for k, v in load_file(path).items() if "_proj" not in k}, {}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "_proj" in name:
            made = quantize.HQQLinear(module, quantize.BaseQuantizeConfig(nbits=bits, group_size=group, axis=1),
                                      compute_dtype=torch.float32, device="cpu", del_orig=False)
            values[f"{name}.weight"] = made.dequantize().reshape(module.weight.shape)
            tensors |= {f"{name}.{key}": value for key, value in made.state_dict().items()}
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, {"format": "pt"})
    stored = open_checkpoint(resolve_model(tmp_path / "model")).tensors
    for name, value in values.items():
        assert stored[name].packed is not None
        assert (read_dequantized(stored[name]) - value).norm() <= 1e-3 * value.norm()


def torchao_configs() -> dict[str, Any]:
    from torchao import quantization
    from torchao.quantization.granularity import PerAxis, PerGroup

    return {"int8": quantization.Int8WeightOnlyConfig(), "float8": quantization.Float8WeightOnlyConfig(),
            "int4": quantization.IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
            "int3": quantization.IntxWeightOnlyConfig(torch.int3, PerAxis(0))}


@pytest.mark.parametrize("case", ["int8", "float8", "int4", "int3"])
def test_files_of_torchao_itself(tmp_path: Path, case: str) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    write(tmp_path / "model", "int8")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    torchao.quantize_(model, torchao_configs()[case], lambda module, name: "_proj" in name)
    values = {name: p.dequantize() for name, p in model.named_parameters() if "_proj" in name}
    tensors, metadata = support.flatten_tensor_state_dict(model.state_dict())
    save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "model" / "model.safetensors",
              metadata)
    stored = open_checkpoint(resolve_model(tmp_path / "model")).tensors
    for name, value in values.items():
        assert stored[name].packed is not None
        assert (read_dequantized(stored[name]) - value).norm() <= 1e-3 * value.norm()
