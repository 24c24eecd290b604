"""GGUF to safetensors, one tensor at a time."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from forebay.rewriter.checkpoints.checkpoint import SINGLE, Progress, Spec
from forebay.rewriter.checkpoints.gguf_config import gguf_model
from forebay.rewriter.checkpoints.gguf_files import write_model_files
from forebay.rewriter.checkpoints.gguf_header import gguf_parts, read_gguf
from forebay.rewriter.checkpoints.gguf_tensors import PlacedParameter, place_tensors
from forebay.rewriter.checkpoints.identity import changed_file, file_states
from forebay.rewriter.checkpoints.new_folder import new_folder
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.checkpoints.write_tensors import require_free, write_new_tensors

OUTPUT_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def convert_gguf(
    path: str | os.PathLike[str],
    out_folder: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    progress: Progress | None = None,
) -> Path:
    """Convert the GGUF file `path` into the Hugging Face folder `out_folder` and return it.

    Writes config.json, generation_config.json, model.safetensors and, where the file has one, the tokenizer. Holds
    about two of the largest tensors in memory, never the model. The folder appears by one rename once everything is
    on disk, so an interrupted conversion leaves no folder of that name. `progress` is called with (bytes written,
    bytes in all). In float32 the result equals `from_pretrained(gguf_file=...)` bit for bit where transformers reads
    the architecture. Raises CheckpointError for an unknown architecture, a truncated or corrupt file, a full disk, or
    an `out_folder` that is already there.
    """
    path, out = Path(path).expanduser(), Path(out_folder).expanduser()
    if dtype not in OUTPUT_DTYPES:
        raise CheckpointError(f"dtype {dtype!r}: choose one of {', '.join(OUTPUT_DTYPES)}")
    if out.exists():
        raise CheckpointError(f"{out} is already there: remove it or name another folder")
    for package in ("gguf", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise CheckpointError(f"reading GGUF files needs {package}: pip install 'forebay[models]'")
    states = file_states(map(str, gguf_parts(path))) if path.is_file() else {}
    header = read_gguf(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    # before anything is written: a tokenizer that does not fit is an error of whatever kind its library has
    require_free(out.parent, sum(math.prod(t.shape) for t in header.tensors) * OUTPUT_DTYPES[dtype].itemsize)
    with new_folder(out) as partial:
        model = gguf_model(header)
        write_model_files(header, model, partial, OUTPUT_DTYPES[dtype])
        _write_weights(place_tensors(header, model), partial, OUTPUT_DTYPES[dtype], progress)
        changed = changed_file(states)
        if changed:
            raise CheckpointError(f"{changed} was changed while it was being converted; try again when nobody "
                                  "writes it")
    return out


def _write_weights(
    placed: Mapping[str, PlacedParameter], folder: Path, dtype: torch.dtype, progress: Progress | None
) -> None:
    specs: list[Spec] = [(name, dtype, tensor.shape) for name, tensor in placed.items()]

    def read(name: str) -> torch.Tensor:
        return placed[name].values().to(dtype)

    write_new_tensors(folder / SINGLE, specs, read, metadata={"format": "pt"}, progress=progress)
