"""Safetensors checkpoints: opened from their headers alone, read one tensor at a time.

Format: https://github.com/huggingface/safetensors#format (8-byte little-endian header length, a JSON header, then the
tensors' bytes without holes).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from forebay.rewriter.checkpoints.identity import FileState, changed_file, file_state, sample_tensors
from forebay.rewriter.checkpoints.records import AddedTensors, CheckpointError, TensorRecord, log_once
from forebay.rewriter.ir.alignment import PAGE_NBYTES, whole_pages
from forebay.rewriter.ir.files import naming, open_input, read_input

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# Bits of an element of the format's other dtypes, whose tensors are known by their bytes alone.
OPAQUE_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "C64": 64}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
GGUF_MAGIC = b"GGUF"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # of PEFT
PIPELINE = "model_index.json"  # of diffusers
MARKS = ("config.json", "modules.json", "export.json")  # one is in the folder of a model, of an embedder, of an export
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
MAX_HEADER_NBYTES = 100_000_000  # the reference implementation's own limit

Progress = Callable[[int, int], None]  # (done, in all)
Spec = tuple[str, torch.dtype, tuple[int, ...]]  # of a tensor: name, dtype, shape


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint, none of whose weights has been read.

    `ties` maps each further name of a tensor to the name it is stored under; both are keys of `tensors`. `states` holds
    what each file was when it was opened. `backing` keeps an unnamed file alive: the records of a spilled module are
    valid as long as their Checkpoint is referenced. `added` has the tensors of adapters, beside those of
    their base.
    """

    folder: Path
    tensors: Mapping[str, TensorRecord]
    fingerprint: str
    ties: Mapping[str, str] = field(default_factory=dict)
    backing: object = field(default=None, repr=False, compare=False)
    states: Mapping[str, FileState] = field(default_factory=dict, repr=False, compare=False)
    added: AddedTensors = field(default_factory=AddedTensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, a tied one counted once."""
        return sum(record.nbytes for name, record in self.tensors.items() if name not in self.ties)

    def require_unchanged(self) -> None:
        """Raise CheckpointError if a file is no longer the one that was opened, or was written to since."""
        path = changed_file(self.states)
        if path is not None:
            raise CheckpointError(f"{path} was changed or replaced while it was in use; what was computed since is not "
                                  "used. Start again with files that nobody writes to")


def open_safetensors(path: Path, *, verify: bool = False) -> Checkpoint:
    """Open a folder (model.safetensors, or model.safetensors.index.json and its shards) or one .safetensors file.

    Raises:
        CheckpointError: Nothing there can be read, or `verify` asks for checksums, which such files lack.
    """
    states: dict[str, FileState] = {}
    if path.is_dir():
        folder = path
        if (path / SINGLE).exists():
            if (path / INDEX).exists() and _named_shards(path) != {SINGLE}:  # as transformers chooses
                log_once(f"{path} holds {SINGLE} and {INDEX}: the first is read, and the files that the second names "
                         "are not; remove the one that is not the model's")
            tensors = _read_noted(path / SINGLE, states)
        elif (path / INDEX).exists():
            tensors = _open_shards(path, states)
        else:
            raise CheckpointError(_explain_missing(path))
    elif path.exists():
        refuse_other_formats(path)
        folder = path.parent
        tensors = _read_noted(path, states)
    else:
        raise CheckpointError(f"no checkpoint at {path}: no such file or folder")
    if verify:
        raise CheckpointError(f"{path} has no checksums to compare its weights with; `forebay quantize` writes models "
                              "that have")
    return Checkpoint(folder, tensors, fingerprint_of(tensors, folder), states=states)


def read_tensor(record: TensorRecord) -> torch.Tensor:
    """Read one tensor into fresh memory, leaving none of its pages in the page cache.

    Raises CheckpointError if the file has become shorter than its header said.
    """
    if record.bands:
        pieces = [replace(record, path=band.path or record.path, offset=record.offset + band.offset, bands=(),
                          nbytes=band.row_nbytes, dtype=torch.uint8, shape=(band.row_nbytes,)) for band in record.bands]
        assert not any(band.has_gaps for band in record.bands), "a tensor is made of whole ones"
        return torch.cat([read_tensor(piece) for piece in pieces]).view(record.dtype).reshape(record.shape)
    if record.nbytes == 0:
        return torch.empty(record.shape, dtype=record.dtype)
    data = torch.empty(record.nbytes, dtype=torch.uint8)
    view = data.numpy().data
    with naming(record.path):
        fd = os.open(record.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead: it would leave pages behind the tensor
            done = 0
            while done < record.nbytes:
                count = os.preadv(fd, [view[done:]], record.offset + done)
                if count == 0:
                    raise CheckpointError(
                        f"{record.path}: truncated: {record.name!r} needs {record.offset + record.nbytes} bytes, "
                        f"the file now has {os.fstat(fd).st_size}"
                    )
                done += count
            first = record.offset // PAGE_NBYTES * PAGE_NBYTES  # the kernel drops whole pages only
            last = whole_pages(record.offset + record.nbytes)
            os.posix_fadvise(fd, first, last - first, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return data.view(record.dtype).reshape(record.shape)


def read_rows(
    record: TensorRecord, lower: int, upper: int, width: int | None = None, dtype: torch.dtype = torch.uint8
) -> torch.Tensor:
    """Rows [lower, upper) of a tensor of single bytes; a row has `width` of them, or the last dimension's."""
    size = record.shape[-1] if width is None else width
    return read_tensor(record.part(lower * size, (upper - lower) * size, dtype, (upper - lower, size)))


def read_header(path: str | os.PathLike[str]) -> dict[str, TensorRecord]:
    """The tensors of one safetensors file in file order, its header proved consistent with its size."""
    header, start, size = _header_object(path)
    header.pop("__metadata__", None)
    records = [_record(str(path), name, entry, start) for name, entry in header.items()]
    records.sort(key=lambda record: (record.offset, record.nbytes))
    end = start
    for record in records:
        if record.offset != end:
            word = "overlaps the tensor before it" if record.offset < end else "leaves a hole before it"
            raise CheckpointError(f"{path}: corrupt header: {record.name!r} {word} (byte {record.offset}, not {end})")
        end += record.nbytes
    if size != end:
        word = "truncated" if size < end else "bytes after the last tensor"
        raise CheckpointError(f"{path}: {word}: expected {end} bytes, the file has {size}")
    return {record.name: record for record in records}


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read the metadata of one safetensors file."""
    found = _header_object(path)[0].get("__metadata__")
    return {key: value for key, value in found.items() if isinstance(value, str)} if isinstance(found, dict) else {}


def _header_object(path: str | os.PathLike[str]) -> tuple[dict[str, Any], int, int]:
    """The header of a safetensors file, the byte after it, and the bytes of the file."""
    try:
        with open_input(path) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(
                    f"{path}: truncated: a safetensors file has at least 8 bytes, this one has {size}"
                )
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_NBYTES or length < 2:
                raise CheckpointError(f"{path}: corrupt header: its length field says {length} bytes")
            if 8 + length > size:
                raise CheckpointError(
                    f"{path}: truncated: the header ends at byte {8 + length}, the file has {size} bytes"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        header = json.loads(text, object_pairs_hook=_object_without_duplicates)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: corrupt header: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: corrupt header: not JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: corrupt header: not a JSON object")
    return header, 8 + length, size


def fingerprint_of(tensors: Mapping[str, TensorRecord], folder: Path | None) -> str:
    """SHA-256 over names, shapes, dtypes and file sizes, and, of the files in `folder`, config.json and what
    `sample_tensors` reads of each tensor: equal for a moved copy, another for another model of that architecture."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        record = tensors[name]
        digest.update(json.dumps([name, DTYPE_NAMES[record.dtype], record.shape]).encode())
    digest.update(json.dumps(sorted(os.stat(path).st_size for path in {r.path for r in tensors.values()})).encode())
    if folder is not None:
        digest.update(sample_tensors(tensors).encode())
    if folder is not None and (folder / "config.json").is_file():
        digest.update(read_input(folder / "config.json"))
    return digest.hexdigest()


def is_gguf(path: Path) -> bool:
    """Return whether a file is a GGUF file: by its name, or by its first bytes, because caches keep files without
    endings."""
    if path.suffix.lower() == ".gguf":
        return not path.is_dir()
    try:
        with open_input(path) as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return False


def require_weights(folder: Path) -> None:
    """Raise CheckpointError, saying what to name instead, for a folder that is no model's: of GGUF files, of folders of
    adapters or models, or of neither."""
    endings = {entry.suffix.lower() for entry in folder.iterdir() if not entry.name.startswith(".")}
    is_one = any((folder / name).exists() for name in MARKS)
    if ".safetensors" not in endings and (not is_one or ".gguf" in endings or adapters_within(folder)):
        raise CheckpointError(_explain_missing(folder))


def refuse_other_formats(path: Path) -> None:
    """Raise CheckpointError, saying how to convert, if the file `path` is a pickle, a GGUF or unknown."""
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(_explain_pickle(path))
    if is_gguf(path):
        raise CheckpointError(f"{path} is a GGUF file: name the file itself to `forebay.wrap` or to a command")
    if path.name == ADAPTER:
        raise CheckpointError(_explain_adapter(path.parent))
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path} is not a checkpoint: expected a folder, a .safetensors or a .gguf file")


def _read_noted(path: Path, states: dict[str, FileState]) -> dict[str, TensorRecord]:
    """`read_header`, with the file's state from before noted in `states`."""
    with contextlib.suppress(OSError):  # what cannot be read is `read_header`'s to say
        states[str(path)] = file_state(path)
    return read_header(path)


def _named_shards(folder: Path) -> set[str]:
    """The files that the index of a folder names, as far as it can be read."""
    try:
        return set(json.loads(read_input(folder / INDEX))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()


def _open_shards(folder: Path, states: dict[str, FileState]) -> dict[str, TensorRecord]:
    try:
        weight_map = json.loads(read_input(folder / INDEX))["weight_map"]
        named = {str(name): str(shard) for name, shard in weight_map.items()}
    except OSError as error:
        raise CheckpointError(f"{folder / INDEX} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / INDEX}: corrupt index: no usable weight_map ({error!r})") from error
    tensors: dict[str, TensorRecord] = {}
    for shard in sorted(set(named.values())):
        if Path(shard).name != shard:
            raise CheckpointError(f"{folder / INDEX}: shard {shard!r} does not lie in the folder itself")
        if not (folder / shard).exists():
            raise CheckpointError(f"{folder}: shard {shard} is named in {INDEX} but missing; fetch it again")
        for name, record in _read_noted(folder / shard, states).items():
            if name in tensors:
                raise CheckpointError(
                    f"{folder}: tensor {name!r} is both in {Path(tensors[name].path).name} and {shard}"
                )
            tensors[name] = record
    for name, shard in named.items():
        if name not in tensors or Path(tensors[name].path).name != shard:
            raise CheckpointError(f"{folder}: {INDEX} puts tensor {name!r} in {shard}, which does not hold it")
    return tensors


def _record(path: str, name: str, entry: object, data_offset: int) -> TensorRecord:
    try:
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]  # type: ignore[index]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: corrupt header: entry of {name!r} is not dtype, shape, data_offsets") from error
    if not isinstance(kind, str):
        raise CheckpointError(f"{path}: corrupt header: {name!r} has dtype {kind!r}")
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise CheckpointError(f"{path}: corrupt header: {name!r} has shape {shape} and offsets {begin}, {end}")
    if kind not in DTYPES:
        bits = math.prod(shape) * OPAQUE_BITS.get(kind, 0)
        if end < begin or (kind in OPAQUE_BITS and 8 * (end - begin) != bits):
            raise CheckpointError(f"{path}: corrupt header: {name!r} is {kind} {list(shape)}, {bits} bits, but its "
                                  f"offsets span {end - begin} bytes")
        return TensorRecord(name, path, data_offset + begin, end - begin, torch.uint8, (end - begin,), opaque=kind)
    dtype = DTYPES[kind]
    if end - begin != nbytes_of((name, dtype, shape)):
        raise CheckpointError(
            f"{path}: corrupt header: {name!r} is {kind} {list(shape)}, {nbytes_of((name, dtype, shape))} bytes, "
            f"but its offsets span {end - begin}"
        )
    return TensorRecord(name, path, data_offset + begin, end - begin, dtype, shape)


def nbytes_of(spec: Spec) -> int:
    """Bytes of a tensor."""
    return spec[1].itemsize * math.prod(spec[2])


def _object_without_duplicates(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    out: dict[str, object] = {}
    for name, value in pairs:
        if name in out:
            raise CheckpointError(f"duplicate entry {name!r}")
        out[name] = value
    return out


def _explain_pickle(path: Path) -> str:
    return (
        f"{path} is a pickle checkpoint, and loading one can run arbitrary code; only safetensors and GGUF are read. "
        "If you trust it, convert it once: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
    )


def _explain_missing(folder: Path) -> str:
    """Return why a folder has no weights, and what to do."""
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    missing = f"{folder} holds neither {SINGLE} nor {INDEX}"
    if ADAPTER in names:
        return _explain_adapter(folder)
    if adapters := adapters_within(folder):
        return adapters
    if any(SHARD.fullmatch(name) for name in names):
        return f"{missing}, which says what its shards hold; fetch it again"
    for found, advice in (([n for n in names if is_gguf(folder / n)], "name a file in it instead"),
                          ([n for n in names if n.endswith(".safetensors")], "transformers reads no other names, such "
                           f"as those of Mistral's own format: fetch {SINGLE} or the shards. It has")):
        if found:
            return f"{missing}; {advice}: {', '.join(found[:5])}"
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        return _explain_pickle(folder / pickles[0])
    if PIPELINE in names:
        return f"{folder} holds a pipeline of diffusers, not one model: torch.compile offloads its parts"
    if MARKS[0] in names:
        return f"{folder} holds no checkpoint: neither {SINGLE} nor {INDEX}"
    models = sorted(path.parent.name for path in folder.glob(f"*/{MARKS[0]}"))
    return f"{folder} is no model's folder: it holds no checkpoint and no {MARKS[0]}" + (
        f"; folders in it do: name one of {', '.join(models[:5])}" if models else "")


def adapters_within(folder: Path) -> str:
    """A sentence that names the adapters in folders of a folder, where PEFT keeps those with names; "" without any."""
    found = sorted(path.parent.name for path in folder.glob(f"*/{ADAPTER_CONFIG}"))
    return f"{folder} holds adapters in folders of its own: name one of {', '.join(found[:5])}" if found else ""


def _explain_adapter(folder: Path) -> str:
    return (f"{folder} holds an adapter ({ADAPTER}) and no weights of its base: name the base as the model, and this "
            "folder as its adapter")
