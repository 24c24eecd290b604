"""A model with an adapter, as a folder of its own that holds no weight of the base:

    adapted.json            the folders of the base and of adapters, and which columns are whose (`AddedTensors`)
    adapter.safetensors     what the adapter adds (`lora_tensors`)
    config.json, tokenizer… copied from the base; the tokenizer is the adapter's, where it brings one
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from forebay.rewriter.checkpoints.checkpoint import Checkpoint, fingerprint_of, read_header
from forebay.rewriter.checkpoints.config import TEMPLATES
from forebay.rewriter.checkpoints.identity import TOKENIZER_FILES, file_state
from forebay.rewriter.checkpoints.lora_tensors import LoraTensor
from forebay.rewriter.checkpoints.new_folder import new_folder
from forebay.rewriter.checkpoints.packed import MANIFEST
from forebay.rewriter.checkpoints.packed_writer import copy_model_files, write_json
from forebay.rewriter.checkpoints.records import AddedTensors, CheckpointError
from forebay.rewriter.checkpoints.write_tensors import write_new_tensors
from forebay.rewriter.ir.files import read_input

ADAPTED, TENSORS = "adapted.json", "adapter.safetensors"
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of which a tokenizer has
CHATS = ("chat_template.jinja", f"{TEMPLATES}/*.jinja")


class MadeOf(NamedTuple):
    """The parts of an adapted model.

    Attributes:
        base: Its folder.
        adapters: Folders by name; "" is the name of one that serves all requests.
        columns: As of `AddedTensors`.
    """

    base: Path
    adapters: Mapping[str, Path]
    columns: Mapping[str, tuple[int, int]]


def made_of(folder: Path) -> MadeOf | None:
    """Return the parts of an adapted model; None for other folders."""
    path = folder / ADAPTED
    if not path.is_file():
        return None
    try:
        said = json.loads(read_input(path))
        return MadeOf(Path(said["base"]), {name: Path(each) for name, each in said["adapters"].items()},
                      {name: (int(first), int(end)) for name, (first, end) in said["columns"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is torn or altered: {error!r}; remove the folder") from error


def weights_folder(folder: Path) -> Path:
    """The folder that holds most weights of a model: of an adapted one that of its base."""
    made = made_of(folder)
    return folder if made is None else made.base


def with_adapters(folder: Path, made: MadeOf, base: Checkpoint) -> Checkpoint:
    """The checkpoint of an adapted model: that of its base, and the adapters' tensors."""
    path = folder / TENSORS
    states = {**base.states, str(path): file_state(path)}
    added = read_header(path)
    told = f"{base.fingerprint} {fingerprint_of(added, folder)} {made.columns}"
    return replace(base, folder=folder, fingerprint=hashlib.sha256(told.encode()).hexdigest(), states=states,
                   added=AddedTensors(added, made.columns))


def write_adapted(made: MadeOf, tensors: Sequence[LoraTensor], out: Path) -> None:
    """Write the folder `out` of an adapted model; it appears by one rename once everything is on disk. The tokenizer is
    that of an adapter which serves all requests, where it brings one."""
    with new_folder(out) as partial:
        copy_model_files(made.base, partial)
        (partial / MANIFEST).unlink(missing_ok=True)  # of the base's weights
        alone = made.adapters.get("")
        if alone is not None and any((alone / name).is_file() for name in TOKENIZER):
            _take_tokenizer(alone, partial)
        read = {tensor.name: tensor.read for tensor in tensors}
        write_new_tensors(partial / TENSORS, [(each.name, each.dtype, each.shape) for each in tensors],
                          lambda name: read[name]())
        write_json(partial / ADAPTED, {"base": str(made.base.absolute()), "columns": made.columns, "adapters": {
            name: str(folder.absolute()) for name, folder in made.adapters.items()}})


def _take_tokenizer(brought: Path, folder: Path) -> None:
    """Put the tokenizer of one folder in the place of another's."""
    patterns = (*TOKENIZER_FILES, *CHATS)
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        path.unlink(missing_ok=True)
    for path in [path for pattern in patterns for path in brought.glob(pattern) if path.is_file()]:
        copy = folder / path.relative_to(brought)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
