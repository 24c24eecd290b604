"""A model folder's config.json, read by transformers, and what ends the model's answers, with one kind of error for all
that can be wrong with them. Python that a model brings along is never run: transformers is told so in every call."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forebay.rewriter.checkpoints.records import CheckpointError, TensorRecord
from forebay.rewriter.checkpoints.text_model import causal_class, not_causal
from forebay.rewriter.ir.files import read_input, special_kind, write_text
from forebay.rewriter.one_thread import one_thread

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

TEMPLATES = "additional_chat_templates"  # a folder of chat templates that have names
# What the transformers loaders are given. Left out, `trust_remote_code` asks on stdin, and a `y` there runs the file.
LOCAL_ONLY: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}


# Fields of a config by what bounds them: a layer has a tensor of its own, and each of these lengths a dimension.
COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "num_encoder_layers",
          "decoder_layers", "encoder_layers")
LENGTHS = ("hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "ffn_dim", "vocab_size",
           "num_attention_heads", "n_head", "num_key_value_heads", "head_dim")
# Other counts, of which each is a Python object or many. Not every one has a tensor, so these many are let through.
OTHER_COUNTS = re.compile(r"(^|_)(layers?|blocks?|depths?|stages?|experts?|codebooks?|quantizers?|inputs|labels)$")
MOST_UNSTORED, MOST_LABELS = 1024, 1 << 16
LABELS, LABELED = "labels", ("id2label", "label2id")  # the dicts are as large as the file has them
# Where there is no checkpoint to compare with; each layer is built, if only on the meta device.
MOST_LAYERS, MOST_LENGTH = 1000, 1 << 31


@one_thread
def read_config(folder: Path, tensors: Mapping[str, TensorRecord] | None = None) -> PreTrainedConfig:
    """The config of the model in `folder`.

    Args:
        folder: The model's folder.
        tensors: Those of its checkpoint: sizes that they cannot hold are refused before anything is built.

    Raises:
        CheckpointError: Where there is no config that makes sense; it names the file.
    """
    from transformers import AutoConfig

    path = folder / "config.json"
    require_regular_files(folder)
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: a model's folder needs it next to the weights")
    _check_sizes(path, tensors)
    try:
        return AutoConfig.from_pretrained(folder, **LOCAL_ONLY)
    except Exception as error:  # each architecture checks its config in its own way
        if brings_code(path):
            raise CheckpointError(f"{path} names Python code of its own (auto_map), which is never run; transformers "
                                  "has no model of that type, and only those that it has itself can be used") from error
        raise CheckpointError(f"{path} describes no model that transformers knows: {error}") from error


def require_regular_files(folder: Path) -> None:
    """Raise CheckpointError for a pipe, a device or a socket in a model's folder, before transformers opens it."""
    for place in (folder, folder / TEMPLATES):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            kind = special_kind(path.stat().st_mode) if path.exists() else None  # a link may lead nowhere
            if kind is not None:
                raise CheckpointError(f"{path} is {kind}, not a regular file; take it out of the model's folder")


def _check_sizes(path: Path, tensors: Mapping[str, TensorRecord] | None) -> None:
    """Refuse counts of layers beyond the number of tensors, and lengths beyond the elements of the largest."""
    try:
        settings = json.loads(read_input(path))
    except (OSError, ValueError, RecursionError):
        return  # said by who reads it
    layers, elements = MOST_LAYERS, MOST_LENGTH
    if tensors is not None:
        layers, elements = len(tensors), max((math.prod(_shape(r)) for r in tensors.values()), default=0)
    found = oversized(settings, layers, elements)
    if found is None:
        return
    name, value = found
    if tensors is None or name.endswith(LABELS):
        raise CheckpointError(f"{path}: {name} is {value}, more than any model has; correct it")
    has = f"{elements} elements in the largest tensor" if name in LENGTHS else f"{layers} tensors"
    raise CheckpointError(f"{path}: {name} is {value}, but the checkpoint has {has}: they do not belong together")


def oversized(settings: Any, most_layers: int, most_elements: int) -> tuple[str, int | float] | None:
    """The first number anywhere in a config that sizes something and is too large for a model; None where none is.

    Args:
        settings: The config as JSON describes it.
        most_layers: Bound of counts of layers.
        most_elements: Bound of lengths.

    Returns:
        The number's name and value.
    """
    waiting: list[tuple[str, Any]] = [("", settings)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, list):
            waiting += ((name, item) for item in value)
        elif isinstance(value, dict):
            waiting += ((key, item) for key, item in value.items() if key not in LABELED)
        elif isinstance(value, int | float) and value > _bound_of(name, most_layers, most_elements):
            return name, value
    return None


def _bound_of(name: str, most_layers: int, most_elements: int) -> float:
    """Return how large the number of that name may be."""
    if name in COUNTS:
        return most_layers
    if name in LENGTHS:
        return most_elements
    if not OTHER_COUNTS.search(name):
        return math.inf
    return MOST_LABELS if name.endswith(LABELS) else max(most_layers, MOST_UNSTORED)


def _shape(record: TensorRecord) -> tuple[int, ...]:
    return record.shape if record.packed is None else record.packed.shape


def brings_code(path: Path) -> bool:
    """Return whether a JSON file of a model's folder names Python to be loaded with it."""
    try:
        settings = json.loads(read_input(path))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(settings, dict) and "auto_map" in settings


@one_thread
def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The causal language model of a config on the meta device, for its names and shapes; CheckpointError where
    there is none, and what its own code objects to."""
    cls: Any = causal_class(config)
    if cls is None:
        raise CheckpointError(not_causal(config))
    with torch.device("meta"):  # its attention is never run; one that the config names could be fetched and loaded
        return cls._from_config(config, attn_implementation="eager")


@one_thread
def read_generation_config(folder: Path) -> GenerationConfig:
    """Read the default generation settings of the model in `folder`: of generation_config.json where there is one, else
    of config.json, as transformers reads them. CheckpointError for a file that cannot be read as such."""
    from transformers import GenerationConfig

    require_regular_files(folder)
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
        raise CheckpointError(f"{path} is no generation config: {error}; fix it or remove it") from error
    return found


def read_eos(folder: Path) -> tuple[int, ...]:
    """The token ids that end an answer: of generation_config.json, else config.json; empty where neither names one.
    CheckpointError for a file that cannot be read as such."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.exists():
            continue
        try:
            settings = json.loads(read_input(path))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not JSON: {error}; fix it or remove it") from error
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
    config = json.loads(read_input(path))
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)
    write_text(path, json.dumps(config, indent=2) + "\n")
