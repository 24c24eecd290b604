"""Checkpoints of bitsandbytes in 8 bits and of BitNet: written here element by element, as their tools lay them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_model import Written, write_quantized
from safetensors.torch import load_file, save_file

import forebay
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.packed import read_dequantized
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.resolve import resolve_model

IDS = torch.tensor([[5, 9, 2, 77, 31]])
NEW = 6
SHAPE = dict(vocab_size=128, hidden_size=192, intermediate_size=320, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=False)
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "_load_in_8bit": True, "llm_int8_threshold": 6.0}
BITNET = {"quant_method": "bitnet", "linear_class": "bitlinear", "quantization_mode": "offline"}


def int8(n: int, k: int) -> Written:
    codes, most = torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n) * 0.3 + 0.01
    most[0] = 0
    parts = {"weight": codes, "SCB": most, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, {}, codes.double() * most.double()[:, None] / 127


def ternary(n: int, k: int, divides: bool) -> Written:
    signs = torch.randint(-1, 2, (n, k))
    packed = torch.zeros(n // 4, k, dtype=torch.uint8)
    for row in range(n):
        packed[row % (n // 4)] |= (signs[row] + 1).to(torch.uint8) << 2 * (row // (n // 4))
    scale = torch.tensor([17.25 if divides else 0.0371])
    return {"weight": packed, "weight_scale": scale}, {}, signs.double() * (1 / scale if divides else scale).double()


def stored(n: int, k: int, groups: int, zeros: bool) -> Written:
    """compressed-tensors' int-quantized, with static scales of activations."""
    codes, scale = torch.randint(-128, 128, (n, k), dtype=torch.int8), torch.rand(n, groups) * 0.002 + 1e-4
    zero = torch.randint(-20, 20, (n, groups), dtype=torch.int8) * zeros
    wide = [part.double().repeat_interleave(k // groups, 1) for part in (scale, zero)]
    parts = {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(1), "input_zero_point": torch.zeros(1)}
    return parts | ({"weight_zero_point": zero} if zeros else {}), {}, (codes - wide[1]) * wide[0]


def w8a8(symmetric: bool) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel", "dynamic": False}
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"], "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}}}


CASES: dict[str, tuple[dict[str, Any], Any, str]] = {
    "w8a8": (w8a8(True), lambda n, k: stored(n, k, 1, False), "w8"),
    "w8a8 zeros": (w8a8(False), lambda n, k: stored(n, k, k // 64, True), "w8g64"),
    "int8": (INT8, int8, "w8"), "bitlinear": (BITNET, lambda n, k: ternary(n, k, True), "w4"),
    "autobitlinear": (BITNET | {"linear_class": "autobitlinear"}, lambda n, k: ternary(n, k, False), "w4")}


def write(folder: Path, case: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model in a folder as the tool saves it, the same in memory with the tool's values, and these by name."""
    settings, made, _ = CASES[case]
    return write_quantized(folder, SHAPE, settings, made)


@pytest.mark.parametrize("case", CASES)
def test_values_are_the_tools_and_the_model_runs_packed(tmp_path: Path, case: str) -> None:
    model, values = write(tmp_path / "model", case)
    folder = resolve_model(tmp_path / "model")
    tensors = open_checkpoint(folder).tensors
    for name, value in values.items():
        packed = tensors[name].packed
        assert packed is not None and packed.format.startswith(CASES[case][2])
        assert packed.rows.symmetric == ("zeros" not in case)
        # scales are rounded once to fp16; what follows is exact, but for lows, which are as large as values
        near = float(3 * 2.0**-11 * value.abs().max()) if "zeros" in case else 0
        torch.testing.assert_close(read_dequantized(tensors[name]), value, rtol=2.0**-11, atol=near)
    with torch.no_grad():
        expected = model(IDS).logits[:, -1]
        tokens = model.generate(IDS, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)
    with forebay.wrap(tmp_path / "model", 1 << 20, prompt=8, new_tokens=NEW) as lm:
        bound = 5e-3 if "zeros" in case else 2e-3
        assert (lm.next_logits(IDS) - expected).abs().max() < bound * expected.abs().max()
        assert torch.equal(lm.generate(IDS, max_new_tokens=NEW, eos_token_id=None), tokens)


@pytest.mark.parametrize(("case", "change", "message"), [
    ("int8", lambda t, q: t.update({f"{q}.weight_format": torch.tensor(2, dtype=torch.uint8)}), "lies in tiles"),
    ("int8", lambda t, q: t.pop(f"{q}.SCB"), "without a scale, where int8 has int8"),
    ("int8", lambda t, q: t.update({f"{q}.SCB": torch.ones(3)}), "128 rows and SCB .3."),
    ("int8", lambda t, q: t.update({f"{q}.SCB": torch.full((128,), torch.nan)}), "no finite number"),
    ("bitlinear", lambda t, q: t.update({f"{q}.weight_scale": torch.zeros(1)}), "one number above 0"),
    ("w8a8", lambda t, q: t.pop(f"{q}.weight_scale"), "without a scale, where stored has int8"),
    ("w8a8", lambda t, q: t.update({f"{q}.weight_scale": torch.ones(0, 1)}), "128 rows and weight_scale .0, 1."),
    ("w8a8 zeros", lambda t, q: t.update({f"{q}.weight_zero_point": torch.ones(64, 2)}), "64, 2.|zero points"),
    ("bitlinear", lambda t, q: t.update({f"{q}.weight": torch.zeros(128, 192)}), "where bitnet has uint8"),
])
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, case: str, change: Any, message: str) -> None:
    write(tmp_path / "model", case)
    file = tmp_path / "model/model.safetensors"
    tensors = load_file(file)
    change(tensors, "model.layers.0.self_attn.q_proj")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        resolve_model(tmp_path / "model")


@pytest.mark.parametrize("settings", [
    {"quant_method": name} for name in ("exl2", "exl3", "quanto", "aqlm", "vptq", "spqr", "eetq")] + [
    BITNET | {"quantization_mode": "online"}, BITNET | {"use_rms_norm": True}, INT8 | {"llm_int8_new": 1}])
def test_other_methods_are_refused_by_name(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
    with pytest.raises(CheckpointError, match=rf"quantized by '?{settings['quant_method']}.*forebay quantize"):
        resolve_model(tmp_path)
