"""The bundle: a folder that starts without the model's code and without capture.

    export.json               the manifest: version, and the SHA-256 of every file here that Forebay reads
    graphs-last.json, …       rewritten block and step graphs as data (`captured_data`), one file for what steps give
    constants.safetensors     what the graphs hold beside weights: rotary tables and the like
    plan.json, machine.json   a plan for the budget named at export, and the machine that it was made for
    weights-*.safetensors     weights at page boundaries, and forebay.json, their manifest (`packed`)
    config.json, tokenizer…   copied from the model

Nothing is unpickled, and no operation is called that `allowed` does not list.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import torch

from forebay.exported.captured_data import captured_from_data, captured_to_data
from forebay.exported.constants import constant_key, read_constants, write_constants
from forebay.exported.whole_folder import MANIFEST
from forebay.rewriter.checkpoints.checkpoint import Checkpoint, Progress
from forebay.rewriter.checkpoints.identity import file_states
from forebay.rewriter.checkpoints.match_weights import file_slices, weight_records, with_stored_formats
from forebay.rewriter.checkpoints.packed import file_checksum, manifest_checksum, open_quantized
from forebay.rewriter.checkpoints.packed_writer import PendingTensor, write_json, write_quantized
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.ir.files import naming, open_input, read_input
from forebay.rewriter.ir.graph import CapturedModel, Gives
from forebay.rewriter.ir.program import FileSlice
from forebay.version import package_version

FORMAT, VERSION = "forebay-bundle", 1
CONSTANTS, PLAN, MACHINE, WEIGHTS = "constants.safetensors", "plan.json", "machine.json", "forebay.json"
GIVES: tuple[Gives, ...] = get_args(Gives)
MOST_NBYTES = 1 << 28  # of a file of graphs: 100 layers take a tenth of a megabyte
CHECKED = {PLAN, MACHINE, CONSTANTS, WEIGHTS, "config.json"}


def graphs_name(gives: Gives) -> str:
    return f"graphs-{gives}.json"


def write_bundle(
    out: Path, models: Mapping[Gives, CapturedModel], items: Mapping[str, PendingTensor], identity: str,
    prepare: Callable[[Path], None], progress: Progress | None, check: Callable[[], None],
) -> None:
    """Write weights, graphs and constants into the empty folder `out`, one piece of a tensor at a time; the manifest is
    left to `seal`. `models` are rewritten graphs, by what their steps give."""
    wanted = {name for model in models.values() for name in model.weights}
    write_quantized(out, [items[name] for name in items if name in wanted], {"source": identity}, prepare,
                    progress=progress, check=check, remember=False)
    kept: dict[str, torch.Tensor] = {}
    for gives, model in models.items():
        keys = {name: constant_key(value, kept) for name, value in model.constants.items()}
        write_json(out / graphs_name(gives), captured_to_data(model, keys))
    fd = os.open(out / CONSTANTS, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        write_constants(fd, out, kept)
    finally:
        os.close(fd)


def seal(out: Path) -> None:
    """Write the manifest: from here on the folder is a bundle."""
    files = {path.name: file_checksum(path) for path in sorted(out.iterdir()) if _is_checked(path.name)}
    manifest: dict[str, Any] = {"format": FORMAT, "version": VERSION, "written_by": package_version(), "files": files}
    write_json(out / MANIFEST, manifest | {"checksum": manifest_checksum(manifest)})


def _is_checked(name: str) -> bool:
    return name in CHECKED or name in {graphs_name(gives) for gives in GIVES}


def is_bundle(folder: Path) -> bool:
    """Return whether the manifest in `folder` is that of a bundle, of any version, or cannot be read."""
    path = folder / MANIFEST
    if not path.is_file():
        return False
    with naming(path), open_input(path) as file:
        return not re.search(rb'"format": "(onnx|pt2|aoti)"', file.read(200))


def read_bundle(
    folder: Path, *, gives: Gives = "last", verify: bool = False
) -> tuple[CapturedModel, Checkpoint, dict[str, FileSlice]]:
    """The model of a bundle, none of whose weights is read (with `verify` each is, and compared with its checksum).
    CheckpointError for a bundle of another version, or whose files are not those that were written."""
    files = read_manifest(folder)
    checkpoint = open_quantized(folder, check="always" if verify else "never")
    checked = [MANIFEST, WEIGHTS, CONSTANTS, "config.json", name := graphs_name(gives)]
    for each in checked:
        if not (folder / each).is_file():
            raise CheckpointError(f"{folder / each} is missing; restore it, or export the model again")
    states = file_states(str(folder / each) for each in checked)  # before they are read
    for each in checked[1:]:
        _check_file(folder, each, files)
    where = folder / name
    try:
        captured = captured_from_data(_parse(where), read_constants(folder / CONSTANTS))
        records = weight_records(captured, checkpoint)
        stored = with_stored_formats(captured, records)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: {error}; export the model again") from error
    odd = [n for n, spec in captured.weights.items() if stored.weights[n].stored != spec.stored]
    if odd:
        raise CheckpointError(f"{where}: {odd[0]} is stored in another format than its graph reads; export again")
    checkpoint = Checkpoint(folder, checkpoint.tensors, checkpoint.fingerprint,
                            states={**checkpoint.states, **states})
    return captured, checkpoint, file_slices(records)


def read_manifest(folder: Path) -> dict[str, str]:
    """The checksums of a bundle's files by name; CheckpointError for a folder that this release cannot read."""
    path = folder / MANIFEST
    try:
        manifest = _parse(path)
        checksum = manifest.pop("checksum", None)
        said = manifest.get("format"), manifest.get("version")
        files = manifest.get("files")
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is torn or altered: {error}; export the model again") from error
    if said != (FORMAT, VERSION):
        raise CheckpointError(f"{path} is {str(said[0])[:40]!r} version {str(said[1])[:40]}; this release reads "
                              f"{FORMAT!r} version {VERSION}: export the model again with it")
    if manifest_checksum(manifest) != checksum or not isinstance(files, dict):
        raise CheckpointError(f"{path} is altered: its checksum does not fit; export the model again")
    return files


def _check_file(folder: Path, name: str, files: Mapping[str, str]) -> None:
    path = folder / name
    with naming(path):
        if name not in files or not path.is_file() or file_checksum(path) != files[name]:
            raise CheckpointError(f"{path} is missing or was altered since the model was exported; restore it, or "
                                  "export again")


def checked_file(folder: Path, name: str) -> Path | None:
    """A bundle's plan or machine, found unaltered; None where it has none."""
    files = read_manifest(folder)
    if name not in files:
        return None
    _check_file(folder, name, files)
    return folder / name


def _parse(path: Path) -> Any:
    with naming(path):
        if path.stat().st_size > MOST_NBYTES:
            raise ValueError(f"{path.stat().st_size} bytes are more than any graph has")
        return json.loads(read_input(path))
