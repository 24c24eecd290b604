"""Read a GGUF file's metadata, or explain why it is not usable."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from forebay.rewriter.checkpoints.gguf_header import GgufHeader
from forebay.rewriter.checkpoints.gguf_keys import NEXTN
from forebay.rewriter.checkpoints.records import CheckpointError

# Tensors that are settings: by what rotary frequencies are divided. Llama 3's, and those of short and long contexts.
ROPE_FREQS, ROPE_SHORT, ROPE_LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"


def require(header: GgufHeader, key: str, accepted: tuple[object, ...]) -> None:
    """CheckpointError for a value of a key that changes what the model computes in ways this release has not."""
    value = header.get(key)
    if value not in accepted:
        wanted = " or ".join(str(v) for v in accepted if v is not None) or "no such key"
        raise CheckpointError(f"{header.path}: {header.architecture}.{key} is {value}, and this release computes with "
                              f"{wanted} only; use the model's safetensors checkpoint")


def read_value(header: GgufHeader, key: str, default: object = None) -> Any:
    """The value of a key: that of all layers, where each has its own."""
    name, value = f"{header.architecture}.{key}", header.get(key)
    if isinstance(value, tuple):
        if len(set(value)) != 1:
            raise CheckpointError(f"{header.path}: {name} differs from layer to layer, which transformers' model of "
                                  "this architecture cannot; use the model's safetensors checkpoint")
        value = value[0]
    if value is None and name in header.metadata:
        raise CheckpointError(f"{header.path}: {name} is a list where one number is expected; convert the model again")
    value = default if value is None else value
    if isinstance(value, str | bool) or value is None:
        what = "is missing" if value is None else f"is {value!r}, not a number"
        raise CheckpointError(f"{header.path}: {name} {what}; convert the model again")
    return value


def read_number(header: GgufHeader, key: str, default: float | None = None) -> float:
    """The value of a key that must be positive and finite; llama.cpp takes 0 for an absent one."""
    value = float(read_value(header, key, default))
    if not (math.isfinite(value) and value > 0):
        raise CheckpointError(f"{header.path}: {header.architecture}.{key} is {value}; it must be above 0")
    return value


def read_layers(header: GgufHeader, key: str) -> list[int]:
    """The value of a key in each layer of the model, where it may differ."""
    count, value = layer_count(header), header.get(key)
    if not isinstance(value, tuple):
        return [int(read_value(header, key))] * count
    if len(value) < count:
        raise CheckpointError(f"{header.path}: {header.architecture}.{key} has {len(value)} entries for {count} "
                              "layers; convert the model again")
    return [int(entry) for entry in value[:count]]


def layer_count(header: GgufHeader) -> int:
    """The layers of the model, without those that draft for it."""
    layers, drafting = int(read_value(header, "block_count")), int(read_value(header, NEXTN, 0))
    if drafting and not 0 <= drafting < layers:
        require(header, NEXTN, (f"fewer than {layers}",))
    return layers - drafting


def has_tensor(header: GgufHeader, name: str, layer: int | None = None) -> bool:
    """Return whether that layer, or any, has a tensor of that name."""
    start = "blk." if layer is None else f"blk.{layer}."
    return any(tensor.name.startswith(start) and tensor.name.endswith(f".{name}") for tensor in header.tensors)


def read_factors(header: GgufHeader, name: str, pairs: int) -> np.ndarray | None:
    """The numbers of a tensor of factors, one for each pair of rotated channels; None where the file has none."""
    found = header.find(name)
    if found is None:
        return None
    if found.kind.name != "F32":
        raise CheckpointError(f"{found.path}: {name} has type {found.kind.name}, not F32; convert the model again")
    if math.prod(found.shape) != pairs:
        raise CheckpointError(f"{found.path}: {name} is {found.shape}, but {pairs} pairs of channels are rotated; "
                              "convert the model again")
    return np.fromfile(found.path, np.float32, math.prod(found.shape), offset=found.offset)
