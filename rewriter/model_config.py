"""A model folder's config.json, read by transformers, with one kind of error for all that can be wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from forebay.rewriter.checkpoint import CheckpointError

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
