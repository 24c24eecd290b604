"""Checkpoints of AWQ, GPTQ and compressed-tensors, packed here element by element by their published layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from forebay.api import wrap
from forebay.rewriter.checkpoints import resolve
from forebay.rewriter.checkpoints.checkpoint import CheckpointError, open_checkpoint
from forebay.rewriter.checkpoints.grouped import read_scheme
from forebay.rewriter.checkpoints.packed import read_dequantized
from forebay.rewriter.checkpoints.resolve import resolve_model

SHAPE = dict(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=False)


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Of codes [..., n] of n · bits = 32 bits int32 words [...], the first code in the lowest bits."""
    values = (codes.long() << (bits * torch.arange(codes.shape[-1]))).sum(-1)
    return (values - ((values >> 31) << 32)).int()


def pack(codes: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Codes of two dimensions as int32 words along `dim`."""
    each = 32 // bits
    lines = codes if dim == 1 else codes.t()
    made = words(lines.reshape(len(lines), -1, each)[..., list(order or range(each))], bits)
    return (made if dim == 1 else made.t()).contiguous()


def quantized(method: str, bits: int, group: int, symmetric: bool, n: int, k: int, dtype: torch.dtype
              ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a random matrix [N, K], and its values in float64."""
    groups, half = (k // group if group > 0 else 1), 1 << (bits - 1)
    codes = torch.randint(0, 1 << bits, (n, k))
    zero = torch.full((n, groups), half) if symmetric else torch.randint(1, 1 << bits, (n, groups))
    scale = (torch.rand(n, groups) * 0.02 + 0.001).to(dtype)
    spread = [part.double().repeat_interleave(k // groups, 1) for part in (scale, zero)]
    values = (codes.double() - spread[1]) * spread[0]
    if method == "gptq":
        return {"qweight": pack(codes.t(), bits, 0), "qzeros": pack(zero.t() - 1, bits, 1),
                "scales": scale.t().contiguous(), "g_idx": (torch.arange(k) // (k // groups)).int()}, values
    if method == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {"qweight": pack(codes.t(), 4, 1, order), "qzeros": pack(zero.t(), 4, 1, order),
                "scales": scale.t().contiguous()}, values
    made = {"weight_packed": pack(codes, bits, 1), "weight_scale": scale, "weight_shape": torch.tensor([n, k])}
    return made | ({} if symmetric else {"weight_zero_point": pack(zero, bits, 0)}), values


def settings(method: str, bits: int, group: int, symmetric: bool) -> dict[str, Any]:
    if method == "gptq":
        return {"quant_method": method, "bits": bits, "group_size": group, "desc_act": False, "sym": symmetric}
    if method == "awq":
        return {"quant_method": method, "bits": bits, "group_size": group, "zero_point": True, "version": "gemm"}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group if group > 0 else None,
               "strategy": "group" if group > 0 else "channel"}
    return {"quant_method": method, "format": "pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place of the test's own for conversions; compiled kernels stay where they are."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(resolve, "cache_folder", lambda: tmp_path / "cache")


def make(folder: Path, method: str, bits: int = 4, group: int = 64, symmetric: bool = True,
         dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    """A Llama whose layers' matrices are quantised; returns their values."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).to(dtype)
    model.save_pretrained(folder)
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if ".layers." in name and value.dim() == 2:
            parts, values[name] = quantized(method, bits, group, symmetric, *value.shape, dtype)
            stored |= {name.replace("weight", part): tensor for part, tensor in parts.items()}
        else:
            stored[name] = value
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings(method, bits, group, symmetric)
    (folder / "config.json").write_text(json.dumps(config))
    return values


CASES = [("gptq", 4, 64, True), ("gptq", 4, 128, False), ("gptq", 8, 32, True), ("gptq", 4, -1, True),
         ("awq", 4, 64, False), ("awq", 4, 128, True), ("compressed-tensors", 4, 128, True),
         ("compressed-tensors", 4, 32, False), ("compressed-tensors", 8, -1, True)]


@pytest.mark.parametrize(("method", "bits", "group", "symmetric"), CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_hold_the_codes(tmp_path: Path, method: str, bits: int, group: int, symmetric: bool,
                             dtype: torch.dtype) -> None:
    """To the bit, where they are symmetric; else to the rounding of a low."""
    values = make(tmp_path / "model", method, bits, group, symmetric, dtype)
    folder = resolve_model(tmp_path / "model")
    found = open_checkpoint(folder, verify=True).tensors
    assert resolve_model(tmp_path / "model") == folder and "quantization_config" not in (
        folder / "config.json").read_text()
    for name, value in values.items():
        packed = found[name].packed
        assert packed is not None and packed.bits == bits and packed.dtype == dtype
        made = read_dequantized(found[name]).double()
        if symmetric:
            assert torch.equal(made, value.to(dtype).double())
        else:
            most = 0.021 * 2**bits  # of a low, and of a value
            assert (made - value).abs().max() <= most * (2.0**-11 + (2.0**-11 if dtype == torch.float16 else 2.0**-8))
    assert found["lm_head.weight"].packed is None


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_logits_are_those_of_the_dequantised_model(tmp_path: Path, method: str) -> None:
    values = make(tmp_path / "model", method, symmetric=method != "awq")
    plain = open_checkpoint(resolve_model(tmp_path / "model", dequantize=True))
    assert all(record.packed is None for record in plain.tensors.values())
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()
    model.load_state_dict({name: read_dequantized(record).float() for name, record in plain.tensors.items()})
    for name, value in values.items():
        assert (model.get_parameter(name).double() - value).abs().max() <= 2.0**-10 * value.abs().max()
    ids = torch.randint(0, 64, (2, 12))
    with wrap(tmp_path / "model", "4MB", batch=2, prompt=12, new_tokens=2) as lm, torch.no_grad():
        ours, theirs = lm(ids).logits.float(), model(ids).logits
    assert (ours - theirs).norm() < 0.01 * theirs.norm()


def test_groups_that_do_not_lie_together_are_refused(tmp_path: Path) -> None:
    make(tmp_path / "model", "gptq")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.g_idx"
    stored[name] = stored[name].flip(0)
    save_file(stored, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight, quantised by gptq, .*desc_act"):
        resolve_model(tmp_path / "model")


@pytest.mark.parametrize(("change", "message"), [
    ({"quant_method": "bitsandbytes"}, "quantised by 'bitsandbytes'; awq, gptq, compressed-tensors are read"),
    ({"quant_method": None}, "quantised by None"), ({"bits": 3}, "gptq of 3 bits"),
    ({"group_size": 48}, "gptq in groups of 48"), ({"bits": "four"}, "lacks what that needs"),
    ({"quant_method": "awq", "version": "gemv"}, "awq in version 'gemv'"),
    ({"quant_method": "awq", "bits": 8}, "awq of 8 bits"),
    ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "format 'float-quantized'"),
    ({"quant_method": "compressed-tensors"}, "lacks what that needs: KeyError"),
])
def test_others_are_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    given = settings("gptq", 4, 64, True) | change
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": given}))
    with pytest.raises(CheckpointError, match=message):
        resolve_model(tmp_path)


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
def test_parts_that_are_missing_are_named(tmp_path: Path, part: str) -> None:
    make(tmp_path / "model", "gptq")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    del stored[f"model.layers.0.mlp.up_proj.{part}"]
    save_file(stored, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj"):
        folder = resolve_model(tmp_path / "model")
        wrap(folder, "4MB")


def test_activations_in_integers_are_refused(tmp_path: Path) -> None:
    given = settings("compressed-tensors", 8, -1, True)
    given["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": given}))
    with pytest.raises(CheckpointError, match="activations quantised too"):
        resolve_model(tmp_path)


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_bits_that_are_no_number_are_refused_by_name(tmp_path: Path, method: str) -> None:
    said = settings(method, 4, 64, True)
    (said["config_groups"]["group_0"]["weights"] if method == "compressed-tensors" else said).update(
        {"num_bits": float("inf"), "bits": float("inf")})
    with pytest.raises(CheckpointError, match=method):
        read_scheme(said, tmp_path)
