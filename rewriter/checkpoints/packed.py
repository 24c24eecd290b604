"""The quantized checkpoint: a folder with safetensors shards, a manifest, and the files of the model it came from.

Shards are plain safetensors files (https://github.com/huggingface/safetensors#format). The format allows no holes, so
every tensor is followed by a filler tensor of bytes up to the next page: each starts at a multiple of 4096 bytes and a
file is whole pages, which direct reads need. A quantized weight is one uint8 matrix [N, R] in the layout of
`forebay.kernels.packing`. `forebay.json` lists every tensor with its place, format and SHA-256; it appears last, by one
rename, so a folder without it is unfinished.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from forebay.kernels.build.cache_folder import cache_folder, make_cache_folder
from forebay.kernels.quantization.quantize.operator import dequantize
from forebay.rewriter.checkpoints.checkpoint import DTYPE_NAMES, DTYPES, Checkpoint, Progress, read_header, read_tensor
from forebay.rewriter.checkpoints.identity import FileState, file_state
from forebay.rewriter.checkpoints.records import CheckpointError, Packed, TensorRecord
from forebay.rewriter.ir.alignment import PAGE_NBYTES
from forebay.rewriter.ir.files import naming, open_input, read_input

MANIFEST, UNFINISHED = "forebay.json", "forebay.unfinished.json"
FORMAT, VERSION = "forebay-quantized", 1
FILLER = "__filler_"  # begins the name of what lies between two tensors
READ_NBYTES = 4 << 20
NATIVE = "native"
_CHECKS = ("changed", "always", "never")


def is_quantized(folder: Path) -> bool:
    """Return whether `folder` holds a quantized checkpoint, finished or not."""
    return (folder / MANIFEST).exists() or (folder / UNFINISHED).exists()


def open_quantized(
    folder: str | os.PathLike[str], *, check: str = "changed", progress: Progress | None = None
) -> Checkpoint:
    """Open the quantized checkpoint in `folder`.

    Manifest, headers, sizes and config.json are checked every time. `check` says when the weights are read and
    compared with their checksums: "always", "never", or, by default, only where a shard is not the very file that
    passed here before (by size, times of change and inode). Raises CheckpointError naming what is missing, torn or
    altered. In `Checkpoint.tensors` a quantized weight has the dtype and shape of its rows, and `packed` says what
    they mean.
    """
    folder = Path(folder).expanduser()
    if check not in _CHECKS:
        raise ValueError(f"check must be one of {', '.join(_CHECKS)}, not {check!r}")
    manifest = read_manifest(folder)
    states: dict[str, FileState] = {}
    tensors, checksums = _records(folder, manifest, states)
    altered = "altered since the model was quantized; restore it, or quantize again"
    if not (folder / "config.json").is_file() or file_checksum(folder / "config.json") != manifest.get("config"):
        raise CheckpointError(f"{folder / 'config.json'} is missing or was {altered}")
    checkpoint = Checkpoint(folder, tensors, manifest["checksum"], states=states)
    if check == "always" or (check == "changed" and _seen(checkpoint) != _noted(checkpoint)):
        verify_tensors(tensors, checksums, progress)
        remember_verified(checkpoint)
    return checkpoint


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`, proved whole by its own checksum."""
    path = folder / MANIFEST
    try:
        text = read_input(path)
    except FileNotFoundError as error:
        if (folder / UNFINISHED).exists():
            raise CheckpointError(f"{folder} is a quantized model that was not finished; run the same "
                                  "`forebay quantize` again to finish it") from error
        raise CheckpointError(f"{folder} holds no quantized model: no {MANIFEST}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        manifest = json.loads(text)
        checksum = manifest.pop("checksum")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is torn or altered: {error!r}; quantize the model again") from error
    if manifest_checksum(manifest) != checksum:
        raise CheckpointError(f"{path} is altered: its checksum does not fit; quantize the model again")
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise CheckpointError(f"{path} is {manifest.get('format')!r} version {manifest.get('version')!r}; this release "
                              f"reads {FORMAT!r} version {VERSION}")
    return manifest | {"checksum": checksum}


def manifest_checksum(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its checksum."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def file_checksum(path: Path) -> str:
    """SHA-256 of a small file."""
    return hashlib.sha256(read_input(path)).hexdigest()


def verify_tensors(
    tensors: Mapping[str, TensorRecord], checksums: Mapping[str, str], progress: Progress | None = None
) -> None:
    """Read tensors in pieces and compare them with their SHA-256; CheckpointError names the first that differs.

    Leaves none of their pages in the page cache.
    """
    done, total = 0, sum(record.nbytes for record in tensors.values())
    for name, record in sorted(tensors.items(), key=lambda entry: (entry[1].path, entry[1].offset)):
        digest = hashlib.sha256()
        with naming(record.path), open_input(record.path, buffering=0) as file:
            left, at = record.nbytes, record.offset
            while left:
                piece = os.pread(file.fileno(), min(left, READ_NBYTES), at)
                if not piece:
                    raise CheckpointError(f"{record.path} is truncated: it ends inside {name!r}")
                digest.update(piece)
                left, at, done = left - len(piece), at + len(piece), done + len(piece)
                os.posix_fadvise(file.fileno(), at - len(piece), len(piece), os.POSIX_FADV_DONTNEED)
                if progress is not None:
                    progress(done, total)
            os.posix_fadvise(file.fileno(), record.offset, record.nbytes, os.POSIX_FADV_DONTNEED)
        if digest.hexdigest() != checksums[name]:
            raise CheckpointError(f"{record.path} is altered or damaged: the bytes of {name!r} are not those written; "
                                  "restore the file, or quantize the model again")


def read_dequantized(record: TensorRecord) -> torch.Tensor:
    """The values of one tensor as the model has them: dequantized, in its own shape and dtype, if it is packed."""
    packed = record.packed
    if packed is None:
        return read_tensor(record)
    parts = packed.rows.unpack(read_tensor(record))
    values = dequantize(*parts, packed.bits, packed.group_size, -1, packed.in_features, packed.dtype,
                        packed.rows.codebook)
    if packed.transposed:
        return values.unflatten(0, (*packed.shape[:-2], -1)).mT.contiguous()
    return values.view(packed.shape)


def describe_packed(packed: Packed | None) -> dict[str, Any] | None:
    """`packed` as JSON values."""
    if packed is None:
        return None
    table = {} if packed.down is None else {"entry_nbytes": packed.entry_nbytes, "down": describe_packed(packed.down)}
    return {"format": packed.format, "bits": packed.bits, "group_size": packed.group_size,
            "scale_dtype": DTYPE_NAMES[packed.scale_dtype], "shape": list(packed.shape),
            "dtype": DTYPE_NAMES[packed.dtype], "transposed": packed.transposed} | table


def shard_records(path: Path, entries: Mapping[str, Mapping[str, Any]]) -> dict[str, TensorRecord]:
    """The tensors of one shard, its header and size proved consistent with each other and with `entries`."""
    if not path.exists():
        raise CheckpointError(f"{path.parent}: shard {path.name} is named in {MANIFEST} but missing; restore it, or "
                              "quantize the model again")
    found = {name: r for name, r in read_header(path).items() if not name.startswith(FILLER)}
    if found.keys() != entries.keys():
        odd = sorted(found.keys() ^ entries.keys())[0]
        raise CheckpointError(f"{path} is altered: {odd!r} is either in it or in {MANIFEST}, not in both")
    records = {}
    for name, record in found.items():
        entry = entries[name]
        if [record.offset, record.nbytes, DTYPE_NAMES[record.dtype], list(record.shape)] != [
                entry["offset"], entry["nbytes"], entry["dtype"], entry["shape"]] or record.offset % PAGE_NBYTES:
            raise CheckpointError(f"{path} is altered: {name!r} does not lie where {MANIFEST} says")
        packed = _parse_packed(entry["packed"])
        if packed is not None and record.shape != (packed.out_features, packed.row_nbytes):
            raise CheckpointError(f"{path}: {name!r} has rows {record.shape}, which {packed.format} does not give for "
                                  f"{packed.shape}")
        records[name] = replace(record, packed=packed)
    return records


def remember_verified(checkpoint: Checkpoint) -> None:
    """Note that these very files passed, or were just written; a cache that cannot be written is done without."""
    path = _note(checkpoint)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        make_cache_folder()
        path.parent.mkdir(exist_ok=True)
        draft.write_text(json.dumps(_noted(checkpoint)))
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)


def _records(
    folder: Path, manifest: Mapping[str, Any], states: dict[str, FileState]
) -> tuple[dict[str, TensorRecord], dict[str, str]]:
    """The tensors that a manifest lists and their checksums; `states` gets each shard's from before it was opened."""
    try:
        shards = manifest["shards"]
        tensors: dict[str, TensorRecord] = {}
        for name, entries in shards.items():
            if Path(name).name != name:
                raise CheckpointError(f"{folder / MANIFEST}: shard {name!r} does not lie in the folder itself")
            if (folder / name).exists():
                states[str(folder / name)] = file_state(folder / name)
            tensors |= shard_records(folder / name, entries)
        return tensors, {name: e["sha256"] for entries in shards.values() for name, e in entries.items()}
    except CheckpointError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{folder / MANIFEST} lacks what version {VERSION} has: {error!r}") from error


def _parse_packed(entry: Mapping[str, Any] | None) -> Packed | None:
    if entry is None:
        return None
    return Packed(entry["format"], entry["bits"], entry["group_size"], DTYPES[entry["scale_dtype"]],
                  tuple(entry["shape"]), DTYPES[entry["dtype"]], entry["transposed"], entry.get("entry_nbytes", 0),
                  _parse_packed(entry.get("down")))


def _note(checkpoint: Checkpoint) -> Path:
    place = hashlib.sha256(str(checkpoint.folder.resolve()).encode()).hexdigest()[:12]
    return cache_folder() / "verified" / f"{checkpoint.fingerprint[:16]}-{place}.json"


def _seen(checkpoint: Checkpoint) -> object:
    try:
        return json.loads(_note(checkpoint).read_text())
    except (OSError, ValueError, RecursionError):
        return None


def _noted(checkpoint: Checkpoint) -> dict[str, list[int]]:
    """The state of every shard as it was opened."""
    return {Path(path).name: list(state) for path, state in sorted(checkpoint.states.items())}
