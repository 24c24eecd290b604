"""A model folder's config.json, read by transformers, and what ends the model's answers, with one kind of error for all
that can be wrong with them. Python that a model brings along is never run: transformers is told so in every call."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forebay.rewriter.checkpoints.checkpoint import CheckpointError, TensorRecord

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

# What the transformers loaders are given. Left out, `trust_remote_code` asks on stdin, and a `y` there runs the file.
LOCAL_ONLY: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}


# Fields of a config by what bounds them: a layer has a tensor of its own, and each of these lengths a dimension.
COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "num_encoder_layers",
          "decoder_layers", "encoder_layers")
LENGTHS = ("hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "ffn_dim", "vocab_size",
           "num_attention_heads", "n_head", "num_key_value_heads", "head_dim", "num_experts", "num_local_experts",
           "n_routed_experts")


def read_config(folder: Path, tensors: Mapping[str, TensorRecord] | None = None) -> PreTrainedConfig:
    """The config of the model in `folder`; CheckpointError, naming the file, where there is none that makes sense.
    `tensors` are those of its checkpoint: what they cannot hold is refused before anything is built."""
    from transformers import AutoConfig

    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: a model's folder needs it beside the weights")
    if tensors is not None:
        _check_sizes(path, len(tensors), max((math.prod(_shape(r)) for r in tensors.values()), default=0))
    try:
        return AutoConfig.from_pretrained(folder, **LOCAL_ONLY)
    except Exception as error:  # each architecture checks its config in its own way
        if brings_code(path):
            raise CheckpointError(f"{path} names Python code of its own (auto_map), which is never run; transformers "
                                  "has no model of that type, and only those that it has itself can be used") from error
        raise CheckpointError(f"{path} describes no model that transformers knows: {error}") from error


def _check_sizes(path: Path, tensors: int, elements: int) -> None:
    """Refuse counts of layers beyond the number of tensors, and lengths beyond the elements of the largest."""
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return  # said by who reads it
    found = oversized(settings, tensors, elements)
    if found is not None:
        name, value = found
        has = f"{tensors} tensors" if name in COUNTS else f"{elements} elements in the largest tensor"
        raise CheckpointError(f"{path}: {name} is {value}, but the checkpoint has {has}: they do not belong together")


def oversized(settings: Any, most_layers: int, most_elements: int) -> tuple[str, int | float] | None:
    """The first count of layers, or length, anywhere in a config that is larger than that; None where none is."""
    waiting = [settings]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
            continue
        if not isinstance(value, dict):
            continue
        waiting += value.values()
        for names, most in ((COUNTS, most_layers), (LENGTHS, most_elements)):
            for name in names:
                found = value.get(name)
                if isinstance(found, int | float) and found > most:
                    return name, found
    return None


def _shape(record: TensorRecord) -> tuple[int, ...]:
    return record.shape if record.packed is None else record.packed.shape


def brings_code(path: Path) -> bool:
    """Whether a JSON file of a model's folder names Python to be loaded with it."""
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(settings, dict) and "auto_map" in settings


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The causal language model of a config on the meta device, for its names and shapes; raises what its own code
    objects to."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):  # its attention is never run; one that the config names could be fetched and loaded
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, attn_implementation="eager")


def read_generation_config(folder: Path) -> GenerationConfig:
    """What the model in `folder` is to be asked for unless told otherwise: of generation_config.json where there is
    one, else of config.json, as transformers reads them. CheckpointError for a file that cannot be read as such."""
    from transformers import GenerationConfig

    read_eos(folder)  # which refuses what are no tokens
    path = folder / "generation_config.json"
    try:
        if path.exists():
            found = GenerationConfig.from_pretrained(folder, local_files_only=True)
        else:
            found = GenerationConfig.from_model_config(read_config(folder))
    except CheckpointError:
        raise
    except Exception as error:  # it checks each of its fields in its own way
        raise CheckpointError(f"{path} is no generation config: {error}; mend it or take it away") from error
    return found


def read_eos(folder: Path) -> tuple[int, ...]:
    """The token ids that end an answer: of generation_config.json, else config.json; empty where neither names one.
    CheckpointError for a file that cannot be read as such."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.exists():
            continue
        try:
            settings = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not JSON: {error}; mend it or take it away") from error
        if not isinstance(settings, dict):
            raise CheckpointError(f"{path}: expected an object, found {type(settings).__name__}")
        eos = settings.get("eos_token_id")
        if eos is None:
            continue
        ids = eos if isinstance(eos, list) else [eos]
        if not all(type(i) is int for i in ids):
            raise CheckpointError(f"{path}: eos_token_id must be a token's number or a list of such, found {eos!r}")
        return tuple(ids)
    return ()


def write_dtype(path: Path, dtype: torch.dtype) -> None:
    """Say in a config.json what its model computes in."""
    config = json.loads(path.read_bytes())
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
