"""A GGUF file's settings as transformers reads them, and what it leaves out of those that change results."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.rewriter.checkpoints.checkpoint import CheckpointError
from forebay.rewriter.checkpoints.config import LOCAL_ONLY
from forebay.rewriter.checkpoints.named_errors import panicking

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from forebay.rewriter.checkpoints.gguf import _Header

# Tensors that are settings: by what rotary frequencies are divided. Llama 3's, and those of short and long contexts.
ROPE_FREQS, ROPE_SHORT, ROPE_LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
# Llama 3.1 to 3.3: frequencies of wavelengths beyond so many positions are divided by a factor, by less down to a
# quarter of that; the file says only what came of it.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Layers of the one size whose attention scales queries by the width that heads would have, not by the one they have.
WIDE_GEMMA = {"gemma2": 46, "gemma3": 62}


@contextmanager
def alone(path: Path) -> Iterator[Path]:
    """A folder in which `path` is the only file: transformers would read the settings of another model beside it."""
    with tempfile.TemporaryDirectory(prefix="forebay-gguf-") as folder:
        (Path(folder) / path.name).symlink_to(path.resolve())
        yield Path(folder)


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
        raise CheckpointError(f"{path}: its metadata does not describe a usable model: {error}") from error


def read_gguf_config(path: Path, header: _Header) -> PreTrainedConfig:
    """The config of the model in `path`: transformers', with the file's rotary base, share and scaling, and Gemma's
    scale of queries, for which transformers has the defaults of one size. CheckpointError for settings that describe no
    model, and for a scaling of rotary frequencies that this release does not know."""
    from transformers import AutoConfig

    with described(path):
        with alone(path) as only:
            config = AutoConfig.from_pretrained(only, gguf_file=path.name, **LOCAL_ONLY)
        _complete(config, path, header)
    return config


def _complete(config: PreTrainedConfig, path: Path, header: _Header) -> None:
    given, kind = header.metadata, header.architecture
    heads, width = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or width // heads
    if kind in WIDE_GEMMA:
        wide = config.num_hidden_layers == WIDE_GEMMA[kind]
        config.query_pre_attn_scalar = width // heads if wide else head_dim
    rope = getattr(config, "rope_parameters", None)
    if rope:
        main = rope.get("full_attention", rope)  # the other one, of sliding windows, is the same in all files
        base = given.get(f"{kind}.rope.freq_base")
        main["rope_theta"] = base if isinstance(base, float) else main["rope_theta"]
        dims = given.get(f"{kind}.rope.dimension_count")
        if "partial_rotary_factor" in main and isinstance(dims, int):
            main["partial_rotary_factor"] = dims / head_dim
        main.update(_scaling(path, header, main["rope_theta"]))
        if main["rope_type"] == "longrope":  # Phi3's own field counts
            config.original_max_position_embeddings = main["original_max_position_embeddings"]
        config.rope_parameters = rope


def _scaling(path: Path, header: _Header, theta: float) -> dict[str, Any]:
    """What transformers calls the file's scaling of rotary frequencies."""
    named = f"{header.architecture}.rope.scaling."
    how = header.metadata.get(f"{named}type", "none")
    factor, context = (header.metadata.get(f"{named}{name}") for name in ("factor", "original_context_length"))
    freqs, short, long = (_factors(path, header, name) for name in (ROPE_FREQS, ROPE_SHORT, ROPE_LONG))
    if short is not None and long is not None and context:
        return {"rope_type": "longrope", "short_factor": short.tolist(), "long_factor": long.tolist(),
                "original_max_position_embeddings": context}
    if freqs is not None and not np.all(freqs == 1):
        most = float(freqs.max())
        if short is None is long and np.allclose(freqs, llama3_factors(most, 2 * len(freqs), theta), rtol=1e-3):
            return {"rope_type": "llama3", "factor": most} | LLAMA3
    elif short is None is long and (how == "none" or not factor or factor == 1.0):
        return {}
    elif short is None is long and how == "linear":
        return {"rope_type": "linear", "factor": factor}
    what = next((f"tensor {name} (F32)" for name, found in
                 ((ROPE_FREQS, freqs), (ROPE_SHORT, short), (ROPE_LONG, long)) if found is not None),
                f"{named}type {how!r}")
    raise CheckpointError(f"{path}: {what} scales rotary frequencies in a way that this release does not know; use the "
                          "model's safetensors checkpoint")


def _factors(path: Path, header: _Header, name: str) -> np.ndarray | None:
    """The numbers of a tensor of factors; None where the file has none."""
    found = next((tensor for tensor in header.tensors if tensor.name == name), None)
    if found is None:
        return None
    if found.kind.name != "F32":
        raise CheckpointError(f"{path}: {name} has type {found.kind.name}, not F32; convert the model again")
    return np.fromfile(path, np.float32, math.prod(found.shape), offset=found.offset)


def llama3_factors(factor: float, dims: int, theta: float) -> np.ndarray:
    """By what Llama 3's scaling divides the frequency of each pair of `dims` rotated channels."""
    turns = LLAMA3["original_max_position_embeddings"] / (2 * math.pi * theta ** (np.arange(0, dims, 2) / dims))
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - kept) / factor + kept)
