"""Folders of models as AWQ, GPTQ and compressed-tensors write them, packed here element by element by their published
layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

SHAPE = dict(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=False)


# Whose matrices `test_coded`, `test_integers`, `test_affine` and `test_mlx` write.
OTHERS: dict[str, dict[str, Any]] = {
    "fp8": {}, "bitsandbytes": {}, "bitnet": {}, "hqq": {}, "torchao": {}, "fbgemm_fp8": {},
    "modelopt": {"quant_algo": "FP8"}, "mlx": {"group_size": 64, "bits": 4},
    "quark": {"global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}}


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


def less_one(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The words of zero points as format gptq stores them: 1 less in each code, by one subtraction from the word."""
    return words - sum(1 << at for at in range(0, 32, bits))


def quantized(method: str, bits: int, group: int, symmetric: bool, n: int, k: int, dtype: torch.dtype
              ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a random matrix [N, K], and its values in float64."""
    groups, half = (k // group if group > 0 else 1), 1 << (bits - 1)
    codes = torch.randint(0, 1 << bits, (n, k))
    zero = torch.full((n, groups), half) if symmetric else torch.randint(0, 1 << bits, (n, groups))
    scale = (torch.rand(n, groups) * 0.02 + 0.001).to(dtype)
    spread = [part.double().repeat_interleave(k // groups, 1) for part in (scale, zero)]
    values = (codes.double() - spread[1]) * spread[0]
    if method == "gptq":
        return {"qweight": pack(codes.t(), bits, 0), "qzeros": less_one(pack(zero.t(), bits, 1), bits),
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
    if method == "mxfp4":  # of one layout
        return {"quant_method": method, "modules_to_not_convert": ["lm_head"]}
    if method == "auto-round":  # words of gptq or awq
        return {"quant_method": method, "bits": bits, "group_size": group, "sym": symmetric,
                "packing_format": f"auto_round:auto_{'gptq' if symmetric else 'awq'}"}
    if method in OTHERS:
        return {"quant_method": method, **OTHERS[method]}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group if group > 0 else None,
               "strategy": "group" if group > 0 else "channel"}
    return {"quant_method": method, "format": "pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}}


def make(folder: Path, method: str, bits: int = 4, group: int = 64, symmetric: bool = True,
         dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    """A Llama whose layers' matrices are quantized; returns their values."""
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


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


def change_settings(folder: Path, **changed: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = config.get("quantization_config", {}) | changed
    (folder / "config.json").write_text(json.dumps(config))
