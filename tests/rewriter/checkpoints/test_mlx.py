"""Checkpoints of mlx: written here element by element by its published layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_model import Written, write_quantized
from safetensors.torch import load_file, save_file
from small_experts import small

import forebay
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.packed import read_dequantized
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.resolve import resolve_model
from tests.rewriter.checkpoints.test_coded import e2m1, e4m3

IDS = torch.tensor([[5, 9, 2, 77, 31]])
SHAPE = dict(vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
             num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=False)


def stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Each code by itself into the words of its row, from the lowest bit on."""
    rows = []
    for row in codes.tolist():
        number = sum(code << (bits * i) for i, code in enumerate(row))
        rows.append([number >> (32 * i) & 0xFFFFFFFF for i in range(len(row) * bits // 32)])
    return torch.tensor(rows, dtype=torch.int64).to(torch.uint32)


def affine(n: int, k: int, bits: int, group: int) -> Written:
    codes = torch.randint(0, 1 << bits, (n, k))
    scales = ((torch.rand(n, k // group) - 0.5) * 0.02).bfloat16()  # of both signs, as mlx has them
    biases = (torch.randn(n, k // group) * 0.02).bfloat16()
    wide = [part.double().repeat_interleave(group, 1) for part in (scales, biases)]
    return {"weight": stream(codes, bits), "scales": scales, "biases": biases}, {}, codes * wide[0] + wide[1]


def coded(n: int, k: int, mode: str) -> Written:
    bits, group = (8, 32) if mode == "mxfp8" else (4, 16 if mode == "nvfp4" else 32)
    codes = torch.randint(0, 126 if bits == 8 else 16, (n, k))
    numbers = torch.tensor([(e4m3 if bits == 8 else e2m1)(code) for code in range(1 << bits)], dtype=torch.float64)
    scales = torch.randint(40, 60, (n, k // group), dtype=torch.uint8)
    each = scales.view(torch.float8_e4m3fn).double() if mode == "nvfp4" else (scales.double() - 127).exp2()
    return {"weight": stream(codes, bits), "scales": scales}, {}, numbers[codes] * each.repeat_interleave(group, 1)


CASES: dict[str, tuple[dict[str, Any], Callable[[int, int], Written], str]] = {
    **{f"{bits} bits": ({"group_size": 64, "bits": bits}, lambda n, k, bits=bits: affine(n, k, bits, 64),
                        "w4g64" if bits <= 4 else "w8g64") for bits in (2, 3, 4, 5, 6, 8)},
    "groups of 32": ({"group_size": 32, "bits": 4, "mode": "affine"}, lambda n, k: affine(n, k, 4, 32), "w4g32"),
    "mxfp4": ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, lambda n, k: coded(n, k, "mxfp4"), "mxfp4"),
    "nvfp4": ({"mode": "nvfp4"}, lambda n, k: coded(n, k, "nvfp4"), "nvfp4"),
    "mxfp8": ({"group_size": 32, "bits": 8, "mode": "mxfp8"}, lambda n, k: coded(n, k, "mxfp8"), "fp8g32"),
}


def write(folder: Path, case: str) -> tuple[Any, dict[str, torch.Tensor]]:
    settings, made, _ = CASES[case]
    found = write_quantized(folder, SHAPE, settings, made)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization": settings}))  # mlx_lm says it twice
    return found


@pytest.mark.parametrize("case", CASES)
def test_values_are_kept_and_the_model_runs_packed(tmp_path: Path, case: str) -> None:
    model, values = write(tmp_path / "model", case)
    tensors = open_checkpoint(resolve_model(tmp_path / "model")).tensors
    for name, value in values.items():
        packed = tensors[name].packed
        assert packed is not None and packed.format == CASES[case][2]
        assert torch.equal(read_dequantized(tensors[name]), value), name
    with torch.no_grad():
        expected = model(IDS).logits[:, -1]
    with forebay.wrap(tmp_path / "model", 1 << 20, prompt=8, new_tokens=2) as lm:
        assert (lm.next_logits(IDS) - expected).abs().max() < 2e-3 * expected.abs().max()


def test_a_module_may_have_settings_of_its_own(tmp_path: Path) -> None:
    """8 bits in groups of 32, whose words and scales are those of twice as many values of 4 bits in groups of 64."""
    _, values = write(tmp_path / "model", "4 bits")
    name, file = "model.layers.0.mlp.up_proj", tmp_path / "model/model.safetensors"
    tensors = load_file(file)
    parts, _, value = affine(256, 128, 8, 32)
    save_file(tensors | {f"{name}.{part}": each for part, each in parts.items()}, file, {"format": "mlx"})
    with pytest.raises(CheckpointError, match=r"shape \[256, 256\], the model's .*up_proj.* has \[256, 128\]"):
        forebay.wrap(tmp_path / "model", 1 << 20)
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["quantization"] = {**config["quantization"], name: {"group_size": 32, "bits": 8}}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    found = open_checkpoint(resolve_model(tmp_path / "model")).tensors
    assert torch.equal(read_dequantized(found[f"{name}.weight"]), value.float())
    other = "model.layers.0.mlp.gate_proj.weight"
    assert torch.equal(read_dequantized(found[other]), values[other])


@pytest.mark.parametrize(("case", "part", "tensor", "told"), [
    ("4 bits", "biases", None, "lacks biases"), ("4 bits", "scales", None, "lacks scales"),
    ("4 bits", "biases", torch.zeros(2, 2), "where floats of one shape"),
    ("4 bits", "scales", torch.full((256, 2), torch.nan), "no finite number"),
    ("mxfp4", "scales", torch.full((256, 4), 255, dtype=torch.uint8), "a scale of 255"),
    ("mxfp8", "scales", torch.ones(256, 4), "with scales of torch.float32, which is not read"),
])
def test_parts_that_do_not_fit_are_refused(
    tmp_path: Path, case: str, part: str, tensor: torch.Tensor | None, told: str
) -> None:
    write(tmp_path / "model", case)
    file, name = tmp_path / "model/model.safetensors", f"model.layers.0.mlp.up_proj.{part}"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors | ({} if tensor is None else {name: tensor}), file, {"format": "mlx"})
    with pytest.raises(CheckpointError, match=told):
        resolve_model(tmp_path / "model")


@pytest.mark.parametrize("mode", ["mxfp2", {"": {}}, 4])
@pytest.mark.parametrize("module", ["", "model.layers.0.mlp.up_proj"])
def test_modes_that_are_unknown_are_refused(tmp_path: Path, mode: object, module: str) -> None:
    write(tmp_path / "model", "mxfp4")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (config["quantization"].setdefault(module, {}) if module else config["quantization"])["mode"] = mode
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"\bmode\b"):
        resolve_model(tmp_path / "model")


@pytest.mark.parametrize(("family", "mixture", "quantized"), [
    ("mixtral", "block_sparse_moe", True), ("qwen3_moe", "mlp", False)])
def test_stacked_experts(tmp_path: Path, family: str, mixture: str, quantized: bool) -> None:
    """Those of a mixture lie in one tensor for each matrix; here one kind of matrix has settings of its own."""
    model = small(family)
    model.save_pretrained(tmp_path)
    tensors, told = {}, {"group_size": 32, "bits": 4}
    settings: dict[str, Any] = dict(told)
    for name, value in model.state_dict().items():
        module, _, matrix = name.replace(".mlp.experts.", f".{mixture}.switch_mlp.").rpartition(".")
        if "switch_mlp" not in module:
            tensors[name.replace(".mlp.", f".{mixture}.")] = value.contiguous()
            continue
        kinds = ("gate", "up") if "gate" in matrix else ("down",)
        for kind, part in zip(kinds, value.chunk(len(kinds), 1), strict=True):
            stacked, bits = f"{module}.{kind}_proj", 8 if kind == "down" else 4
            if not quantized:
                tensors[f"{stacked}.weight"] = part.contiguous()
                continue
            if bits == 8:
                settings[stacked] = told | {"bits": 8}
            made = [affine(*part.shape[1:], bits, 32) for _ in part]
            tensors |= {f"{stacked}.{own}": torch.stack([each[0][own] for each in made]) for own in made[0][0]}
            part.copy_(torch.stack([each[2] for each in made]))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "mlx"})
    if quantized:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization": settings}))
    with torch.no_grad():
        expected = model(IDS).logits[:, -1]
    with forebay.wrap(tmp_path, "330KB" if quantized else "8MB", prompt=5, new_tokens=2) as lm:
        assert not quantized or any(spec.stored for spec in lm.captured.weights.values())
        assert not quantized or lm.plan.prediction.streamed_nbytes > 0
        assert (lm.next_logits(IDS) - expected).norm() < 1e-4 * expected.norm()
