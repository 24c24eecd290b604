"""A model folder's config.json, read by transformers, and what ends the model's answers, with one kind of error for all
that can be wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.rewriter.checkpoints.checkpoint import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def read_config(folder: Path) -> PreTrainedConfig:
    """The config of the model in `folder`; CheckpointError, naming the file, where there is none that makes sense."""
    from transformers import AutoConfig

    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: a model's folder needs it beside the weights")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # each architecture checks its config in its own way
        raise CheckpointError(f"{path} describes no model that transformers knows: {error}") from error


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
