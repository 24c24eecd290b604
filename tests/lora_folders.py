"""Adapters as PEFT saves them, made of random numbers, and a transformers model with what they mean merged into it."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

PREFIX = "base_model.model."


def write_lora(folder: Path, model: Any, modules: str, base: Path | str = "", **settings: Any) -> Path:
    """Write an adapter of the modules whose names match, with random numbers as large as the base's.

    Args:
        folder: To be made.
        model: The base in memory.
        modules: Pattern of names of modules.
        base: The name of the base.
        settings: Fields of LoraConfig; those that are left out have PEFT's defaults.
    """
    chosen = {"r": 4, "lora_alpha": 6, "use_rslora": False, "use_dora": False, "bias": "none", "modules_to_save": None,
              "rank_pattern": {}, "alpha_pattern": {}, "lora_bias": False, "layers_to_transform": None,
              "init_lora_weights": True, "fan_in_fan_out": False, "lora_dropout": 0.0} | settings
    tensors = {}
    for name, module in model.named_modules():
        layer = re.search(r"\.(\d+)\.", name)
        only = chosen["layers_to_transform"]
        if not re.fullmatch(modules, name) or (only is not None and layer and int(layer[1]) not in only):
            continue
        rank, (rows, columns) = _of(chosen["rank_pattern"], name, chosen["r"]), module.weight.shape
        looked_up, transposed = isinstance(module, nn.Embedding), type(module).__name__ == "Conv1D"
        inputs, outputs = (rows, columns) if looked_up or transposed else (columns, rows)
        ends = ("embedding_A", "embedding_B") if looked_up else ("A.weight", "B.weight")
        tensors[f"{name}.lora_{ends[0]}"] = torch.randn(rank, inputs) / inputs**0.5
        tensors[f"{name}.lora_{ends[1]}"] = torch.randn(outputs, rank) * 0.2
        if chosen["lora_bias"]:
            tensors[f"{name}.lora_B.bias"] = torch.randn(outputs) * 0.1
        if chosen["use_dora"] and not looked_up:
            tensors[f"{name}.lora_magnitude_vector"] = module.weight.norm(dim=0 if transposed else 1) * (
                torch.rand(outputs) + 0.5)
        if chosen["bias"] == "all" and module.bias is not None:
            tensors[f"{name}.base_layer.bias"] = torch.randn(outputs) * 0.1
    for saved in chosen["modules_to_save"] or ():
        name, module = next((n, m) for n, m in model.named_modules() if n.endswith(saved))
        tensors[f"{name}.weight"] = module.weight.detach() + 0.02 * torch.randn_like(module.weight)
    folder.mkdir()
    save_file({PREFIX + name: value.contiguous() for name, value in tensors.items()},
              folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(chosen | {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "inference_mode": True,
        "target_modules": sorted({name.partition(".lora_")[0] for name in tensors if ".lora_" in name})}))
    return folder


def merged(model: Any, folder: Path) -> Any:
    """A copy of a model with the adapter of a folder in its weights, by the formulas of the papers."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    tensors = {name.removeprefix(PREFIX): value for name, value in load_file(
        folder / "adapter_model.safetensors").items()}
    made = copy.deepcopy(model)
    saved = {name.replace(".base_layer", ""): value for name, value in tensors.items() if ".lora_" not in name}
    for name, value in saved.items():
        owner = made.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], nn.Parameter(value.clone()))  # a tied one is a weight of its own then
    for name, module in list(made.named_modules()):
        embedded = f"{name}.lora_embedding_A" in tensors
        ends = ("embedding_A", "embedding_B") if embedded else ("A.weight", "B.weight")
        if f"{name}.lora_{ends[0]}" not in tensors:
            continue
        a, b = (tensors[f"{name}.lora_{end}"].double() for end in ends)
        rank = _of(settings["rank_pattern"], name, settings["r"])
        scale = _of(settings["alpha_pattern"], name, settings["lora_alpha"]) / (
            math.sqrt(rank) if settings["use_rslora"] else rank)
        turned = embedded or type(module).__name__ == "Conv1D"
        weight = (module.weight.T if turned else module.weight).double() + scale * (b @ a)
        if (magnitude := tensors.get(f"{name}.lora_magnitude_vector")) is not None:
            weight *= (magnitude / weight.norm(dim=1))[:, None]
        module.weight = nn.Parameter((weight.T if turned else weight).to(module.weight.dtype).contiguous())
        if (bias := tensors.get(f"{name}.lora_B.bias")) is not None:
            own = 0 if module.bias is None else module.bias
            module.bias = nn.Parameter(own + scale * bias)
    return made


def _of(patterns: dict[str, Any], name: str, otherwise: Any) -> Any:
    return next((value for key, value in patterns.items() if name.endswith(key)), otherwise)
