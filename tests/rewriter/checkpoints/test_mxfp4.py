"""Experts in MXFP4 as gpt-oss stores them: every code and scale as transformers reads it, packed and in steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_experts import small
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import forebay
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.quantize import Wish, quantize_model
from forebay.rewriter.checkpoints.quantize_source import open_folder_source
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.resolve import resolve_model

NEW = 8
IDS = torch.tensor([[5, 9, 2, 77, 31]])


def stored(folder: Path, scales: tuple[int, int] = (118, 124)) -> Any:
    """A small gpt-oss in a folder, its experts in MXFP4; returns the model that transformers would make of it."""
    model = small("gpt_oss", torch.bfloat16)
    model.save_pretrained(folder)
    tensors, drawn = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = parameter.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=drawn, dtype=torch.uint8)
            scale = torch.randint(*scales, blocks.shape[:-1], generator=drawn, dtype=torch.uint8)
            parameter.data = convert_moe_packed_tensors(blocks, scale, dtype=torch.bfloat16).contiguous()
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scale}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(described | {"quantization_config": settings}))
    return model


def test_every_code_and_scale_is_what_transformers_reads(tmp_path: Path) -> None:
    model = stored(tmp_path, (0, 255))
    weights = dict(model.named_parameters())
    tensors = [t for t in open_folder_source(tmp_path).tensors if t.name.endswith(("gate_up_proj", "down_proj"))]
    assert len(tensors) == 2 * model.config.num_hidden_layers
    for tensor in tensors:
        expected = weights[tensor.name].detach()
        assert tensor.shape == tuple(expected.shape)
        assert torch.equal(torch.cat([*tensor.contents()]), expected.flatten(0, 1))
        by_output = expected.transpose(1, 2).flatten(0, 1).float()
        rows = tensor.rows(True)
        assert torch.equal(torch.cat([rows(0, 3), rows(3, len(by_output))]), by_output)


@pytest.mark.parametrize("dequantize", [False, True])
def test_tokens_equal_transformers(tmp_path: Path, dequantize: bool) -> None:
    model = stored(tmp_path / "model")
    folder = resolve_model(tmp_path / "model", dequantize=dequantize)
    packed = {name for name, record in open_checkpoint(folder).tensors.items() if record.packed is not None}
    assert len(packed) == (0 if dequantize else 2 * model.config.num_hidden_layers)
    for name, record in open_checkpoint(folder).tensors.items():
        assert record.packed is None or record.packed.format == "mxfp4", name
    expected = model.float().generate(IDS, max_new_tokens=NEW, do_sample=False)
    wide = tmp_path / "float32"  # both compute in it: products of bf16 round otherwise here and there
    quantize_model(tmp_path / "model", wide, Wish("native" if dequantize else "keep", dtype=torch.float32))
    nbytes = sum(p.numel() * 4 for p in model.parameters())
    for budget in (2 * nbytes, nbytes // 2):
        with forebay.wrap(wide, {"device": budget, "disk": tmp_path}, prompt=5, new_tokens=NEW) as lm:
            assert torch.equal(lm.generate(IDS, max_new_tokens=NEW, do_sample=False), expected)


def test_they_are_quantized_to_fewer_bits(tmp_path: Path) -> None:
    stored(tmp_path / "model")
    made = quantize_model(tmp_path / "model", tmp_path / "w4", Wish("w4g32"))
    formats = {r.packed.format for name, r in made.tensors.items() if r.packed is not None and "experts" in name}
    assert formats == {"w4g32"}


def replaced(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors | ({} if tensor is None else {name: tensor}), folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(("part", "tensor", "told"), [
    ("scales", None, "lacks scales"),
    ("blocks", None, "no tensor for"),
    ("scales", torch.zeros(8, 64, 1, dtype=torch.uint8), "where uint8 .E, N, K / 32, 16. and"),
    ("blocks", torch.zeros(8, 64, 3, 16), "has blocks of torch.float32"),
    ("scales", torch.full((8, 64, 3), 255, dtype=torch.uint8), "is no number")])
def test_damaged_parts_are_refused(tmp_path: Path, part: str, tensor: torch.Tensor | None, told: str) -> None:
    stored(tmp_path / "model")
    replaced(tmp_path / "model", f"model.layers.1.mlp.experts.down_proj_{part}", tensor)
    with pytest.raises(CheckpointError, match=told):
        quantize_model(tmp_path / "model", tmp_path / "out", Wish("keep"))
