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
from forebay.rewriter.checkpoints.gguf_header import GgufHeader
from forebay.rewriter.checkpoints.named_errors import panicking
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.one_thread import one_thread

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Tensors that are settings: by what rotary frequencies are divided. Llama 3's, and those of short and long contexts.
ROPE_FREQS, ROPE_SHORT, ROPE_LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
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
    table = keys.ARCHITECTURES[header.architecture]
    if header.architecture == "llama" and header.get("expert_count"):
        table = keys.MIXTRAL
    _refuse_other_keys(header, table)
    found: dict[str, Any] = {"model_type": table.model_type, **table.constants}
    for key, field in table.fields.items():
        default = table.defaults.get(key)
        if key == "attention.head_count_kv":
            default = found["num_attention_heads"]
        found[field] = _value(header, key, default)
    layers, width, heads = (int(_value(header, key)) for key in
                            ("block_count", "embedding_length", "attention.head_count"))
    if heads < 1:
        raise CheckpointError(f"{header.path}: {header.architecture}.attention.head_count is {heads}; at least 1 head "
                              "is needed")
    head_dim = _head_width(header, table, width, heads)
    if table.head_field:
        found["head_dim"] = head_dim
    names = {tensor.name for tensor in header.tensors}
    embedding = header.find("token_embd.weight")
    found["vocab_size"] = header.get(keys.VOCABULARY) or (embedding.shape[0] if embedding else None)
    found["tie_word_embeddings"] = "output.weight" not in names
    found |= _token_ids(header, found["vocab_size"]) | _biases(table, names)
    if header.architecture == "stablelm":
        found["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in names
        found["use_qkv_bias"] = "blk.0.attn_q.bias" in names
    if header.architecture == "gpt2":
        _require(header, "attention.head_count_kv", (None, heads))
        return found
    rope = _rope(header, table, head_dim)
    found["rope_parameters"] = rope
    if header.architecture in WIDE_GEMMA:
        wide = layers == WIDE_GEMMA[header.architecture]
        found["query_pre_attn_scalar"] = width // heads if wide else head_dim
        found |= _windows(header, table, layers, rope)
    if header.architecture == "phi3":
        found["sliding_window"] = found["sliding_window"] or None
        found["original_max_position_embeddings"] = rope.get(
            "original_max_position_embeddings", found["max_position_embeddings"])
    return found


def _refuse_other_keys(header: GgufHeader, table: keys.Architecture) -> None:
    """Refuse keys of other architectures unless their values change nothing; warn of unknown ones."""
    prefix = f"{header.architecture}."
    unknown = []
    for name in header.metadata:
        key = name.removeprefix(prefix)
        if key == name or key in {*table.fields, *table.reads, *table.unread, *keys.HARMLESS}:
            continue
        if key in keys.SAME_IN_WINDOWS:
            _require(header, key, (header.get(keys.SAME_IN_WINDOWS[key]),))
        elif key in keys.NEUTRAL:
            _require(header, key, keys.NEUTRAL[key])
        elif header.architecture == "gpt2" and key in keys.ROPE:
            continue  # it has learned positions, and rotates nothing
        elif not key.startswith("vision."):  # settings of a model for images
            unknown.append(name)
    if unknown:
        warnings.warn(f"{header.path}: llama.cpp reads no {', '.join(sorted(unknown))} for models of this "
                      "architecture, nor does forebay: the settings are passed over", stacklevel=5)


def _require(header: GgufHeader, key: str, accepted: tuple[object, ...]) -> None:
    """CheckpointError for a value of a key that changes what the model computes in ways this release has not."""
    value = header.get(key)
    if value not in accepted:
        wanted = " or ".join(str(v) for v in accepted if v is not None) or "no such key"
        raise CheckpointError(f"{header.path}: {header.architecture}.{key} is {value}, and this release computes with "
                              f"{wanted} only; use the model's safetensors checkpoint")


def _value(header: GgufHeader, key: str, default: object = None) -> Any:
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


def _number(header: GgufHeader, key: str, default: float) -> float:
    """The value of a key that must be positive and finite; llama.cpp takes 0 for an absent one."""
    value = float(_value(header, key, default))
    if not (math.isfinite(value) and value > 0):
        raise CheckpointError(f"{header.path}: {header.architecture}.{key} is {value}; it must be above 0")
    return value


def _head_width(header: GgufHeader, table: keys.Architecture, width: int, heads: int) -> int:
    """Channels of a head, of queries and keys as of values."""
    told = header.get(keys.WIDTH)
    if told is None and header.architecture == "llama":
        told = header.get(keys.DIMENSIONS)  # files from before the key existed: it rotates whole heads
    head_dim = width // heads if told is None else int(_value(header, keys.WIDTH, told))
    if not table.head_field:
        _require(header, keys.WIDTH, (None, width // heads))
        head_dim = width // heads
    _require(header, keys.VALUE_WIDTH, (None, head_dim))
    return head_dim


def _token_ids(header: GgufHeader, vocabulary: Any) -> dict[str, Any]:
    """The fields of special tokens; an id outside the vocabulary means none, as in llama.cpp."""
    found: dict[str, Any] = dict.fromkeys(TOKEN_IDS.values())
    if header.metadata.get("tokenizer.ggml.model") == "llama":
        found |= SENTENCEPIECE_IDS
    for key, field in TOKEN_IDS.items():
        told = header.metadata.get(f"tokenizer.ggml.{key}")
        if told is not None:
            found[field] = told if 0 <= told < vocabulary else None  # type: ignore[operator]
    return found


def _biases(table: keys.Architecture, names: set[str]) -> dict[str, Any]:
    """The fields that give a model the biases that the file has; a tensor that finds no place is refused later."""
    found: dict[str, Any] = {}
    if table.attention_bias and "blk.0.attn_output.bias" in names:
        found[table.attention_bias] = True
    if table.mlp_bias and "blk.0.ffn_up.bias" in names:
        found[table.mlp_bias] = True
    if table.model_type == "llama" and not found and "blk.0.attn_q.bias" in names:
        found["model_type"] = "qwen2"  # which is Llama with biases of queries, keys and values
    return found


def _windows(header: GgufHeader, table: keys.Architecture, layers: int, rope: dict[str, Any]) -> dict[str, Any]:
    """Gemma's fields for layers with a sliding window, and for soft caps."""
    window = int(_value(header, keys.WINDOW, table.defaults[keys.WINDOW]))
    pattern = header.get(keys.PATTERN)
    if isinstance(pattern, tuple):
        if len(pattern) < layers:
            raise CheckpointError(f"{header.path}: {header.architecture}.{keys.PATTERN} has {len(pattern)} entries "
                                  f"for {layers} layers; convert the model again")
        slides = [bool(entry) for entry in pattern[:layers]]
    else:
        period = int(_value(header, keys.PATTERN, table.defaults[keys.PATTERN]))
        slides = [period == 0 or layer % period < period - 1 for layer in range(layers)]
    theta = _number(header, keys.WINDOW_BASE, table.defaults.get(keys.WINDOW_BASE, rope["rope_theta"]))
    found: dict[str, Any] = {}
    if header.architecture == "gemma2":
        _number(header, keys.WINDOW, window)
        _number(header, keys.ATTENTION_CAP, table.defaults[keys.ATTENTION_CAP])
        _number(header, keys.FINAL_CAP, table.defaults[keys.FINAL_CAP])
        if theta != rope["rope_theta"]:
            _require(header, keys.WINDOW_BASE, (rope["rope_theta"],))
    else:
        cap = float(_value(header, keys.FINAL_CAP, 0.0))
        found["final_logit_softcapping"] = cap or None
        found["rope_parameters"] = {"full_attention": rope,
                                    "sliding_attention": {"rope_type": "default", "rope_theta": theta}}
        if window < 1:  # transformers asks for the width of a window that no layer has
            slides, found["sliding_window"] = [False] * layers, int(_value(header, "context_length"))
    return found | {"layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides]}


def _rope(header: GgufHeader, table: keys.Architecture, head_dim: int) -> dict[str, Any]:
    """The parameters of the rotation of queries and keys."""
    theta = _number(header, keys.BASE, 10000.0)
    dims = int(_value(header, keys.DIMENSIONS, head_dim))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if table.partial:
        if not 0 < dims <= head_dim:
            _require(header, keys.DIMENSIONS, (head_dim,))
        share = dims / head_dim
        rope["partial_rotary_factor"] = share if int(head_dim * share) == dims else math.nextafter(share, 2)
    else:
        _require(header, keys.DIMENSIONS, (None, head_dim))
    return rope | _scaling(header, theta, dims)


def _scaling(header: GgufHeader, theta: float, dims: int) -> dict[str, Any]:
    """What transformers calls the file's scaling of rotary frequencies."""
    named = f"{header.architecture}.{keys.SCALING}"
    how = header.get(keys.SCALING)
    how = "linear" if how is None else how
    factor = float(_value(header, keys.FACTOR, _value(header, keys.OLD_FACTOR, 0.0))) or 1.0
    attention = _number(header, keys.ATTENTION_FACTOR, 1.0)
    freqs, short, long = (_factors(header, name, dims // 2) for name in (ROPE_FREQS, ROPE_SHORT, ROPE_LONG))
    if how == "none":
        factor = 1.0
    if how not in ("none", "linear", "longrope", "yarn") or (how != "linear" and factor != 1) or not 0 < factor < 1e9:
        raise _unknown(header, f"{named} {how!r} with factor {factor}")
    if short is not None and long is not None and freqs is None and factor == 1:
        return _long_rope(header, short, long, attention)
    _require(header, keys.ATTENTION_FACTOR, (None, 1))
    for name, found in ((ROPE_SHORT, short), (ROPE_LONG, long)):
        if found is not None:
            raise _unknown(header, f"tensor {name} (F32)")
    if freqs is None or np.all(freqs == 1):
        if header.architecture == "phi3" and factor != 1:  # transformers' Phi3 knows no other scaling
            same = np.full(dims // 2, factor)
            return _long_rope(header, same, same, attention)
        return {} if factor == 1 else {"rope_type": "linear", "factor": factor}
    most = float(freqs.max())
    if factor == 1 and np.allclose(freqs, llama3_factors(most, dims, theta), rtol=1e-3):
        return {"rope_type": "llama3", "factor": most} | LLAMA3
    raise _unknown(header, f"tensor {ROPE_FREQS} (F32)")


def _long_rope(header: GgufHeader, short: np.ndarray, long: np.ndarray, attention: float) -> dict[str, Any]:
    """Frequencies divided by one of two lists: up to the original context, and beyond."""
    context = header.get(keys.ORIGINAL_CONTEXT) or _value(header, "context_length")
    return {"rope_type": "longrope", "short_factor": short.tolist(), "long_factor": long.tolist(),
            "original_max_position_embeddings": context, "attention_factor": attention}


def _unknown(header: GgufHeader, what: str) -> CheckpointError:
    return CheckpointError(f"{header.path}: {what} scales rotary frequencies in a way that this release does not know; "
                           "use the model's safetensors checkpoint")


def _factors(header: GgufHeader, name: str, pairs: int) -> np.ndarray | None:
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


def llama3_factors(factor: float, dims: int, theta: float) -> np.ndarray:
    """By what Llama 3's scaling divides the frequency of each pair of `dims` rotated channels."""
    turns = LLAMA3["original_max_position_embeddings"] / (2 * math.pi * theta ** (np.arange(0, dims, 2) / dims))
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - kept) / factor + kept)
