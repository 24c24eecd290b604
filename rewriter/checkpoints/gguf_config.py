"""The config of transformers for the model in a GGUF file, from the file's own metadata."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.rewriter.checkpoints import gguf_keys as keys
from forebay.rewriter.checkpoints.config import meta_model
from forebay.rewriter.checkpoints.gguf_architectures import ARCHITECTURES, MIXTRAL, Architecture
from forebay.rewriter.checkpoints.gguf_header import GgufHeader
from forebay.rewriter.checkpoints.gguf_layers import layer_fields, read_windows
from forebay.rewriter.checkpoints.gguf_values import (
    ROPE_FREQS,
    ROPE_LONG,
    ROPE_SHORT,
    layer_count,
    read_factors,
    read_number,
    read_value,
    require,
)
from forebay.rewriter.checkpoints.named_errors import panicking
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.one_thread import one_thread

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Llama 3.1 to 3.3: frequencies of wavelengths beyond so many positions are divided by a factor, by less down to a
# quarter of that; the file says only what came of it.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Layers of the one size whose attention scales queries by the width that heads would have, not by the one they have.
WIDE_GEMMA = {"gemma2": 46, "gemma3": 62}
# The token ids of a SentencePiece vocabulary that llama.cpp takes where the file names none.
SENTENCEPIECE_IDS = {"bos_token_id": 1, "eos_token_id": 2}
TOKEN_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}


@contextmanager
def described(path: Path) -> Iterator[None]:
    """Turn what transformers' code raises for settings that make no sense, each architecture in its own way, into a
    CheckpointError that names the file."""
    try:
        with panicking():
            yield
    except (CheckpointError, ImportError, OSError, MemoryError):
        raise
    except Exception as error:
        why = " ".join(str(error).split())
        raise CheckpointError(f"{path}: its metadata does not describe a usable model: {why}") from error


def gguf_model(header: GgufHeader) -> PreTrainedModel:
    """The model that `header` describes, on the meta device.

    Raises:
        CheckpointError: as `read_gguf_config` does.
    """
    config = read_gguf_config(header)
    with described(header.path):
        return meta_model(config)


@one_thread
def read_gguf_config(header: GgufHeader) -> PreTrainedConfig:
    """The config of the model that `header` describes, every key of whose architecture is obeyed.

    Raises:
        CheckpointError: settings that describe no model, or that this release cannot compute with.
    """
    from transformers import AutoConfig

    with described(header.path):
        return AutoConfig.for_model(**_fields(header))


def _fields(header: GgufHeader) -> dict[str, Any]:
    """The fields of the config, `model_type` among them."""
    table = ARCHITECTURES[header.architecture]
    if header.architecture == "llama" and header.get("expert_count"):
        table = MIXTRAL
    _refuse_other_keys(header, table)
    found: dict[str, Any] = {"model_type": table.model_type, **table.constants}
    for key, field in table.fields.items():
        default = table.defaults.get(key)
        if key == keys.KV_HEADS:
            default = found["num_attention_heads"]
        found[field] = layer_count(header) if key == "block_count" else read_value(header, key, default)
    names = {tensor.name for tensor in header.tensors}
    embedding = header.find("token_embd.weight")
    found["vocab_size"] = header.get(keys.VOCABULARY) or (embedding.shape[0] if embedding else None)
    found["tie_word_embeddings"] = "output.weight" not in names
    found |= _token_ids(header, found["vocab_size"]) | _biases(table, names)
    if table.model_type not in ("mamba", "mamba2"):
        found |= _head_fields(header, table, found)
    return found | layer_fields(header, found)


def _head_fields(header: GgufHeader, table: Architecture, found: dict[str, Any]) -> dict[str, Any]:
    """Return the config's fields for heads and their rotation."""
    layers, width, heads = (int(read_value(header, key)) for key in
                            ("block_count", "embedding_length", "attention.head_count"))
    if heads < 1:
        raise CheckpointError(f"{header.path}: {header.architecture}.attention.head_count is {heads}; at least 1 head "
                              "is needed")
    if table.model_type in ("gemma4_text", "kimi_linear"):
        return {}  # layers differ
    if table.model_type == "deepseek_v2":
        return {"rope_parameters": _rope(header, table, int(read_number(header, keys.DIMENSIONS)))}
    head_dim = _head_width(header, table, width, heads)
    fields: dict[str, Any] = {"head_dim": head_dim} if table.head_field else {}
    if header.architecture == "stablelm":
        fields["use_parallel_residual"] = header.find("blk.0.ffn_norm.weight") is None
        fields["use_qkv_bias"] = header.find("blk.0.attn_q.bias") is not None
    if header.architecture == "gpt2":
        require(header, keys.KV_HEADS, (None, heads))
    if not table.rotary:
        return fields
    rope = _rope(header, table, head_dim)
    fields["rope_parameters"] = rope
    if header.architecture in WIDE_GEMMA:
        wide = layers == WIDE_GEMMA[header.architecture]
        fields["query_pre_attn_scalar"] = width // heads if wide else head_dim
        fields |= _windows(header, table, rope)
    if header.architecture == "phi3":
        fields["sliding_window"] = found["sliding_window"] or None
        fields["original_max_position_embeddings"] = rope.get(
            "original_max_position_embeddings", found["max_position_embeddings"])
    return fields


def _refuse_other_keys(header: GgufHeader, table: Architecture) -> None:
    """Refuse keys of other architectures unless their values change nothing; warn of unknown ones."""
    prefix = f"{header.architecture}."
    unknown = []
    for name in header.metadata:
        key = name.removeprefix(prefix)
        if key == name or key in {*table.fields, *table.reads, *table.unread, *keys.HARMLESS}:
            continue
        if key in keys.SAME_IN_WINDOWS:
            require(header, key, (header.get(keys.SAME_IN_WINDOWS[key]),))
        elif key in keys.NEUTRAL:
            require(header, key, keys.NEUTRAL[key])
        elif not table.rotary and key in keys.ROPE:
            continue
        elif not key.startswith("vision."):  # settings of a model for images
            unknown.append(name)
    if unknown:
        warnings.warn(f"{header.path}: llama.cpp reads no {', '.join(sorted(unknown))} for models of this "
                      "architecture, nor does forebay: the settings are passed over", stacklevel=5)


def _head_width(header: GgufHeader, table: Architecture, width: int, heads: int) -> int:
    """Channels of a head, of queries and keys as of values."""
    told = header.get(keys.WIDTH)
    if told is None and header.architecture == "llama":
        told = header.get(keys.DIMENSIONS)  # files from before the key existed: it rotates whole heads
    head_dim = width // heads if told is None else int(read_value(header, keys.WIDTH, told))
    if not table.head_field:
        require(header, keys.WIDTH, (None, width // heads))
        head_dim = width // heads
    require(header, keys.VALUE_WIDTH, (None, head_dim))
    return head_dim


def _token_ids(header: GgufHeader, vocabulary: Any) -> dict[str, Any]:
    """The fields of special tokens; an id outside the vocabulary means none, as in llama.cpp."""
    found: dict[str, Any] = dict.fromkeys(TOKEN_IDS.values())
    if header.metadata.get("tokenizer.ggml.model") == "llama":
        found |= SENTENCEPIECE_IDS
    for key, field in TOKEN_IDS.items():
        told = header.metadata.get(f"tokenizer.ggml.{key}")
        if told is not None:
            at = first_id(told)
            found[field] = at if at is not None and 0 <= at < vocabulary else None
    return found


def first_id(told: object) -> int | None:
    """The id that a key of the metadata names, of several the first; None where it names none."""
    at = next(iter(told), None) if isinstance(told, tuple) else told
    return at if isinstance(at, int) else None


def _biases(table: Architecture, names: set[str]) -> dict[str, Any]:
    """The fields that give a model the biases that the file has; a tensor that finds no place is refused later."""
    found: dict[str, Any] = {}
    if table.attention_bias and "blk.0.attn_output.bias" in names:
        found[table.attention_bias] = True
    if table.mlp_bias and "blk.0.ffn_up.bias" in names:
        found[table.mlp_bias] = True
    if table.model_type == "llama" and not found and "blk.0.attn_q.bias" in names:
        found["model_type"] = "qwen2"  # which is Llama with biases of queries, keys and values
    return found


def _windows(header: GgufHeader, table: Architecture, rope: dict[str, Any]) -> dict[str, Any]:
    """Gemma's fields for layers with a sliding window, and for soft caps."""
    window = int(read_value(header, keys.WINDOW, table.defaults[keys.WINDOW]))
    types = read_windows(header, window, int(table.defaults[keys.PATTERN]))
    theta = read_number(header, keys.WINDOW_BASE, table.defaults.get(keys.WINDOW_BASE, rope["rope_theta"]))
    found: dict[str, Any] = {}
    if header.architecture == "gemma2":
        read_number(header, keys.WINDOW, window)
        read_number(header, keys.ATTENTION_CAP, table.defaults[keys.ATTENTION_CAP])
        read_number(header, keys.FINAL_CAP, table.defaults[keys.FINAL_CAP])
        if theta != rope["rope_theta"]:
            require(header, keys.WINDOW_BASE, (rope["rope_theta"],))
    else:
        cap = float(read_value(header, keys.FINAL_CAP, 0.0))
        found["final_logit_softcapping"] = cap or None
        found["rope_parameters"] = {"full_attention": rope,
                                    "sliding_attention": {"rope_type": "default", "rope_theta": theta}}
        if window < 1:  # transformers asks for the width of a window that no layer has
            found["sliding_window"] = int(read_value(header, "context_length"))
    return found | {"layer_types": types}


def _rope(header: GgufHeader, table: Architecture, head_dim: int) -> dict[str, Any]:
    """The parameters of the rotation of queries and keys."""
    theta = read_number(header, keys.BASE, 10000.0)
    dims = int(read_value(header, keys.DIMENSIONS, head_dim))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if table.partial:
        if not 0 < dims <= head_dim:
            require(header, keys.DIMENSIONS, (head_dim,))
        share = dims / head_dim
        rope["partial_rotary_factor"] = share if int(head_dim * share) == dims else math.nextafter(share, 2)
    else:
        require(header, keys.DIMENSIONS, (None, head_dim))
    return rope | _scaling(header, theta, dims)


def _scaling(header: GgufHeader, theta: float, dims: int) -> dict[str, Any]:
    """Return transformers' name for the file's scaling of rotary frequencies."""
    named = f"{header.architecture}.{keys.SCALING}"
    how = header.get(keys.SCALING)
    how = "linear" if how is None else how
    factor = float(read_value(header, keys.FACTOR, read_value(header, keys.OLD_FACTOR, 0.0))) or 1.0
    attention = read_number(header, keys.ATTENTION_FACTOR, 1.0)
    freqs, short, long = (read_factors(header, name, dims // 2) for name in (ROPE_FREQS, ROPE_SHORT, ROPE_LONG))
    if how == "none":
        factor = 1.0
    if how not in ("none", "linear", "longrope", "yarn") or (how == "longrope" and factor != 1) or not 0 < factor < 1e9:
        raise _unknown(header, f"{named} {how!r} with factor {factor}")
    if short is not None and long is not None and freqs is None and factor == 1:
        return _long_rope(header, short, long, attention)
    require(header, keys.ATTENTION_FACTOR, (None, 1))
    for name, found in ((ROPE_SHORT, short), (ROPE_LONG, long)):
        if found is not None:
            raise _unknown(header, f"tensor {name} (F32)")
    if freqs is None or np.all(freqs == 1):
        if header.architecture == "phi3" and factor != 1:  # transformers' Phi3 knows no other scaling
            same = np.full(dims // 2, factor)
            return _long_rope(header, same, same, attention)
        if factor == 1 or how == "linear":
            return {} if factor == 1 else {"rope_type": "linear", "factor": factor}
        return _yarn(header, factor)
    most = float(freqs.max())
    if factor == 1 and np.allclose(freqs, llama3_factors(most, dims, theta), rtol=1e-3):
        return {"rope_type": "llama3", "factor": most} | LLAMA3
    raise _unknown(header, f"tensor {ROPE_FREQS} (F32)")


def _yarn(header: GgufHeader, factor: float) -> dict[str, Any]:
    """High frequencies as they are, low ones divided by a factor, and a ramp between."""
    require(header, "rope.scaling.yarn_ext_factor", (None, -1, 1))
    context = header.get(keys.ORIGINAL_CONTEXT) or read_value(header, "context_length")
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context,
            "beta_fast": read_number(header, keys.YARN_FAST, 32.0),
            "beta_slow": read_number(header, keys.YARN_SLOW, 1.0)}


def _long_rope(header: GgufHeader, short: np.ndarray, long: np.ndarray, attention: float) -> dict[str, Any]:
    """Frequencies divided by one of two lists: up to the original context, and beyond."""
    context = header.get(keys.ORIGINAL_CONTEXT) or read_value(header, "context_length")
    return {"rope_type": "longrope", "short_factor": short.tolist(), "long_factor": long.tolist(),
            "original_max_position_embeddings": context, "attention_factor": attention}


def _unknown(header: GgufHeader, what: str) -> CheckpointError:
    return CheckpointError(f"{header.path}: {what} scales rotary frequencies in a way that this release does not know; "
                           "use the model's safetensors checkpoint")


def llama3_factors(factor: float, dims: int, theta: float) -> np.ndarray:
    """By what Llama 3's scaling divides the frequency of each pair of `dims` rotated channels."""
    turns = LLAMA3["original_max_position_embeddings"] / (2 * math.pi * theta ** (np.arange(0, dims, 2) / dims))
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - kept) / factor + kept)
