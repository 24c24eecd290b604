"""Small models as tools of quantization save them, written weight by weight."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

# The tensors that stand for a weight, by the end of their names; what the file's metadata says of it; its values.
Written = tuple[dict[str, torch.Tensor], dict[str, Any], torch.Tensor]


def write_quantized(
    folder: Path, shape: Mapping[str, Any], settings: Mapping[str, Any], made: Callable[[int, int], Written]
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Write a Llama in whose projections `made` gives [n, k] values.

    Returns:
        The same model in memory with these values, and them by name.
    """
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).eval()
    model.save_pretrained(folder)
    tensors, values = load_file(folder / "model.safetensors"), {}
    metadata = {"format": "pt"}
    for name, weight in list(tensors.items()):
        if "_proj" in name:
            parts, about, value = made(*weight.shape)
            del tensors[name]
            tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
            metadata |= {name: json.dumps(about)} if about else {}
            values[name] = value.float()
    save_file(tensors, folder / "model.safetensors", metadata)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    model.load_state_dict(values, strict=False)
    return model, values
