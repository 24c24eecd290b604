"""Rewritten graphs of models opened before, kept in the cache folder: the next start captures nothing, and imports no
code of models.

    graphs/KEY.json           a checksum, the model as a bundle has it (`captured_data`), and where its weights lie
    graphs/KEY.safetensors    its constants

KEY is a digest of whatever decides the graphs: the files of the model as `stat` tells them, or its config where plans
need no more; what is asked of the capture; and the code of Forebay, torch and transformers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch

from forebay.exported.captured_data import captured_from_data, captured_to_data
from forebay.exported.constants import constant_key, read_constants, write_constants
from forebay.exported.errors import ExportError
from forebay.kept_texts import digest_of, keep_text, read_kept
from forebay.kernels.build.cache_folder import make_cache_folder
from forebay.rewriter.capture.family import FAMILIES
from forebay.rewriter.checkpoints.checkpoint import Checkpoint
from forebay.rewriter.checkpoints.identity import file_states, states_checksum
from forebay.rewriter.checkpoints.match_weights import warn_once
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.ir.files import written_whole
from forebay.rewriter.ir.from_json import from_json
from forebay.rewriter.ir.graph import CapturedModel
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.pipeline import pass_list

LOG = logging.getLogger("forebay")
MOST = 64  # models; those opened longest ago go
MOST_NBYTES = 1 << 28  # of constants that are kept


def graphs_key(folder: Path, checkpoint: Checkpoint, settings: object) -> str | None:
    """The name that the graphs of a folder go by.

    Args:
        folder: The model's folder.
        checkpoint: Its weights, opened.
        settings: What else was asked of the capture, as something to print.

    Returns:
        The name; None where code from outside Forebay takes part, which nobody can tell the state of.
    """
    described = [str(path) for path in folder.iterdir() if path.suffix in (".json", ".py") and path.is_file()]
    states = [(path, list(state)) for path, state in sorted(checkpoint.states.items())]
    return _key(folder.resolve(), settings, states_checksum(file_states(described)), states)


def config_key(config: Mapping[str, object], settings: object) -> str | None:
    """The name that the graphs of a model without weights go by, as `graphs_key` gives one."""
    return _key(json.dumps(config, sort_keys=True, default=repr), settings)


def _key(*described: object) -> str | None:
    """The digest of what describes a model, and of the code that makes graphs of it."""
    takes_part = (*(each.run for each in pass_list.PASSES), *(each.prepare for each in FAMILIES.values()),
                  *(prepare for each in FAMILIES.values() for _, prepare in each.replaced.values()))
    if any(not each.__module__.startswith("forebay.") for each in takes_part):
        return None
    return digest_of(*described, [each.name for each in pass_list.PASSES])


def read_graphs(key: str) -> tuple[CapturedModel, dict[str, FileSlice]] | None:
    """The graphs kept under `key`, and where the weights lie; None where there are none as they were written."""
    try:
        described, constants = _files(key)
        if (text := read_kept(described)) is None:
            return None
        data = json.loads(text)
        tensors = read_constants(constants)
        if any(name != constant_key(value, {}) for name, value in tensors.items()):
            raise ValueError("other constants")
        captured = captured_from_data(data["model"], tensors)
        slices = {name: from_json(FileSlice, each, name) for name, each in data["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, CheckpointError) as error:
        LOG.debug("graphs kept as %s are passed over: %s", key, error)
        return None
    for text in data["said"]:
        warn_once(text)
    return replace(captured, kept_as=key), slices


def keep_graphs(key: str, captured: CapturedModel, files: Mapping[str, FileSlice], said: list[str]) -> None:
    """Keep rewritten graphs under `key`, with the warnings to repeat. What cannot be kept is captured again next time.
    """
    tensors: dict[str, torch.Tensor] = {}
    keys = {name: constant_key(value, tensors) for name, value in captured.constants.items()}
    if sum(value.nbytes for value in tensors.values()) > MOST_NBYTES:
        return
    try:
        text = json.dumps({"model": captured_to_data(captured, keys), "said": said,
                           "files": {name: asdict(each) for name, each in files.items()}})
        described, constants = _files(key)
        described.parent.mkdir(mode=0o700, exist_ok=True)
        with written_whole(constants, "wb") as file:
            write_constants(file.fileno(), constants.parent, tensors)
        keep_text(described, text, MOST)
    except (OSError, ExportError) as error:
        LOG.debug("graphs are not kept: %s", error)


def _files(key: str) -> tuple[Path, Path]:
    folder = make_cache_folder() / "graphs"
    return folder / f"{key}.json", folder / f"{key}.safetensors"
