"""LoRA adapters as PEFT saves them, or holds them in memory: which matrices of a model they change, and by how much.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint. The settings are those of PEFT's LoraConfig.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from forebay.rewriter.checkpoints.checkpoint import (
    ADAPTER,
    ADAPTER_CONFIG,
    INDEX,
    SINGLE,
    read_header,
    read_tensor,
)
from forebay.rewriter.checkpoints.config import require_regular_files
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.ir.files import read_input

PREFIX = "base_model.model."
KEY = re.compile(r"(?P<module>.+)\.(?P<part>lora_(A|B|embedding_A|embedding_B|magnitude_vector))"
                 r"(\.(default\.)?(?P<kind>weight|bias))?")
# Settings that say how an adapter was trained, or whose effect the tensors show.
RECORDS = frozenset((
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_bias", "lora_dropout", "megatron_config", "megatron_core", "modules_to_save", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type", "use_dora",
))
READ = frozenset({"alpha_pattern", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern", "use_rslora"})
# Ways to begin that leave the base's weights as they are; the others change them when PEFT loads the adapter.
BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")

ReadTensor = Callable[[], torch.Tensor]


@dataclass
class LoraModule:
    """An adapter's tensors for one module, by the module's name in the model that was trained.

    Attributes:
        scale: Multiplies B A.
        rank: Rows of A, as the settings say.
        parts: Tensors by their names in PEFT: lora_A, lora_B, lora_B.bias, lora_embedding_A, lora_embedding_B,
            lora_magnitude_vector.
    """

    scale: float
    rank: int
    parts: dict[str, ReadTensor] = field(default_factory=dict)


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter, none of whose tensors has been read.

    Attributes:
        name: The folder, or how else messages name it.
        modules: What it adds, by modules.
        replaced: Parameters that it has in place of the base's: biases, and those of `modules_to_save`.
    """

    name: str
    modules: Mapping[str, LoraModule]
    replaced: Mapping[str, ReadTensor]


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter, and no model."""
    return (folder / ADAPTER_CONFIG).is_file() and not any((folder / name).exists() for name in (SINGLE, INDEX))


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of the adapter in a folder. CheckpointError where there is none that can be read."""
    path = folder / ADAPTER_CONFIG
    require_regular_files(folder)
    try:
        settings = json.loads(read_input(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} holds no adapter: no {ADAPTER_CONFIG}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path}: expected an object, found {type(settings).__name__}")
    return settings


def read_lora(folder: Path) -> LoraAdapter:
    """Read the adapter in a folder, but for its tensors.

    Raises:
        CheckpointError: It is damaged, or of a kind that is not implemented.
    """
    settings, path = read_settings(folder), folder / ADAPTER
    if not path.exists():
        raise CheckpointError(f"{folder} has no {ADAPTER}; adapters in pickle files are not read: save it with "
                              "safe_serialization=True")
    records = read_header(path)
    for record in records.values():
        if not record.dtype.is_floating_point or record.opaque:
            raise CheckpointError(f"{path}: {record.name} is {record.opaque or str(record.dtype)[6:]}; packed adapters "
                                  "are not read")
    return lora_adapter(str(folder), settings, {name: partial(read_tensor, each) for name, each in records.items()})


def lora_adapter(name: str, settings: Mapping[str, Any], tensors: Mapping[str, ReadTensor]) -> LoraAdapter:
    """Sort the tensors of an adapter, by PEFT's names of them. CheckpointError as of `read_lora`."""
    _check_settings(name, settings)
    modules: dict[str, LoraModule] = {}
    replaced: dict[str, ReadTensor] = {}
    for key, read in tensors.items():
        own = key.removeprefix(PREFIX)
        found = KEY.fullmatch(own)
        if found is None:
            if "lora_" in own or "token_adapter" in own:
                raise CheckpointError(f"{name}: what {key} means is not known; merge the adapter into its base")
            replaced[own.replace(".base_layer.", ".").replace(".modules_to_save.", ".")] = read
            continue
        module, part = found["module"], found["part"] + (".bias" if found["kind"] == "bias" else "")
        if re.search(r"\bexperts\b", module):
            raise CheckpointError(f"{name}: it changes experts ({module}), which is not implemented; merge the adapter "
                                  "into its base")
        if module not in modules:
            modules[module] = LoraModule(*_scale(name, settings, module))
        modules[module].parts[part] = read
    if not modules and not replaced:
        raise CheckpointError(f"{name}: the adapter holds no tensor")
    return LoraAdapter(name, modules, replaced)


def _check_settings(name: str, settings: Mapping[str, Any]) -> None:
    if (kind := settings.get("peft_type")) not in ("LORA", None):
        raise CheckpointError(f"{name}: an adapter of peft_type {getattr(kind, 'value', kind)}; LORA is implemented")
    for key, value in settings.items():
        if value and key not in RECORDS | READ:
            raise CheckpointError(f"{name}: {key} = {value!r} in {ADAPTER_CONFIG} is not implemented; merge the "
                                  "adapter into its base")
    if (begun := settings.get("init_lora_weights")) not in BEGINNINGS:
        raise CheckpointError(f"{name}: init_lora_weights = {begun!r} changes weights of the base; save the adapter "
                              "with path_initial_model_for_weight_conversion")


def _scale(name: str, settings: Mapping[str, Any], module: str) -> tuple[float, int]:
    """The factor and the rank of a module."""
    try:
        rank = int(_of_pattern(settings.get("rank_pattern"), module, settings["r"]))
        alpha = float(_of_pattern(settings.get("alpha_pattern"), module, settings["lora_alpha"]))
        return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank), rank
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, re.error) as error:
        raise CheckpointError(f"{name}: {ADAPTER_CONFIG} gives no rank and alpha for {module} ({error!r})") from error


def _of_pattern(patterns: Mapping[str, Any] | None, module: str, otherwise: Any) -> Any:
    """The value of the first pattern that the end of a module's name matches, as PEFT looks them up."""
    return next((value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)
