"""The header of a GGUF model: its metadata and where each tensor lies, in one file or in several."""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from forebay.rewriter.checkpoints.checkpoint import GGUF_MAGIC
from forebay.rewriter.checkpoints.gguf_architectures import ARCHITECTURES
from forebay.rewriter.checkpoints.records import CheckpointError
from forebay.rewriter.ir.files import open_input

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

# Metadata value types, from https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: scalars as `struct` has them.
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
MOST_DIMENSIONS = 4  # as the format has it
MOST_KEPT = 4096  # numbers of an array that is read: one for each layer, say; longer ones belong to the tokenizer
# Sizes in the metadata that a tensor's dimensions bound; the layers are bounded by the number of tensors.
LENGTHS = ("embedding_length", "feed_forward_length", "vocab_size", "attention.head_count", "attention.head_count_kv",
           "attention.key_length", "attention.value_length", "expert_count")
# The name of one file of a split model, as llama.cpp writes and looks for it; numbers count from 1.
PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<ending>\.gguf)",
                  re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class GgufTensor:
    """The place of a tensor.

    Attributes:
        name: the name in the file.
        shape: the slowest dimension first, as torch has it.
        kind: the type of the values.
        path: the file that holds the tensor.
        offset: of the first byte in that file.
        nbytes: the length.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """The part of a GGUF file before its weights.

    Attributes:
        path: the file, of a split model the first one.
        architecture: one of `ARCHITECTURES`.
        metadata: value of each key; arrays of at most `MOST_KEPT` numbers are tuples, other arrays None.
        tensors: all tensors, of all files.
    """

    path: Path
    architecture: str
    metadata: dict[str, object]
    tensors: tuple[GgufTensor, ...]

    def get(self, key: str) -> object:
        """The value of a key of the architecture; None if it is absent."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def find(self, name: str) -> GgufTensor | None:
        """The tensor of that name; None if there is none."""
        return next((tensor for tensor in self.tensors if tensor.name == name), None)


class _Fields:
    """Reads a GGUF header's little-endian fields in turn; EOFError where the file ends inside one."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = os.fstat(file.fileno()).st_size

    def skip(self, nbytes: int) -> None:
        if self.file.tell() + nbytes > self.size:
            raise EOFError
        self.file.seek(nbytes, os.SEEK_CUR)

    def unpack(self, form: str) -> Any:
        values = self.unpack_all(form)
        return values[0] if len(values) == 1 else values

    def unpack_all(self, form: str) -> tuple[Any, ...]:
        nbytes = struct.calcsize(form)
        if self.file.tell() + nbytes > self.size:
            raise EOFError
        return struct.unpack(form, self.file.read(nbytes))

    def string(self) -> str:
        length = self.unpack("<Q")
        if self.file.tell() + length > self.size:
            raise EOFError
        return self.file.read(length).decode()

    def value(self, kind: int, whole: bool = False) -> object:
        """A string, a number or a tuple of few numbers; other arrays are stepped over and give None, unless they are
        asked for as a `whole`."""
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, count = self.unpack("<IQ")
            if inner in SCALARS and (whole or count <= MOST_KEPT):
                return self.unpack_all(f"<{count}{SCALARS[inner][1]}")
            if inner in SCALARS:
                self.skip(count * struct.calcsize(SCALARS[inner]))
            elif inner == STRING and whole:
                return tuple(self.string() for _ in range(count))
            else:
                for _ in range(count):
                    self.skip(self.unpack("<Q")) if inner == STRING else self.value(inner)
        elif kind in SCALARS:
            return self.unpack(SCALARS[kind])
        else:
            raise ValueError(f"unknown metadata type {kind}")
        return None


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """The files of the model in `path`, in order: that file alone, or every part of a split model.

    Raises:
        CheckpointError: a part is absent, or the file is one part of a model and is not named like one.
    """
    return _parts(path, _parse(path)[0]) if PART.fullmatch(path.name) and path.is_file() else (path,)


def read_gguf(path: Path) -> GgufHeader:
    """Read the header of the GGUF model in `path`, which may be any part of a split model.

    Raises:
        CheckpointError: a file is absent, truncated or corrupt, or the architecture is none of `ARCHITECTURES`.
    """
    metadata, tensors = _parse(path)
    parts = _parts(path, metadata)
    if len(parts) > 1:
        read = [(metadata, tensors) if part == path else _parse(part) for part in parts]
        for number, (part, (said, _)) in enumerate(zip(parts, read, strict=True), start=1):
            if (said.get("split.no"), said.get("split.count")) != (number - 1, len(parts)):
                raise CheckpointError(f"{part} is not part {number} of {len(parts)} of a split model, as its name "
                                      "says; give the parts the names they were published with")
        metadata, tensors = read[0][0], [tensor for _, found in read for tensor in found]
        if metadata.get("split.tensors.count", len(tensors)) != len(tensors):
            raise CheckpointError(f"{parts[0]} says that the split model has {metadata['split.tensors.count']} "
                                  f"tensors, but its {len(parts)} parts hold {len(tensors)}; fetch all of them again")
    architecture = str(metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{path} has GGUF architecture {architecture!r}; those converted are {known}")
    try:
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise ValueError("two tensors have one name")
        _check_sizes(metadata, len(tensors), max((math.prod(tensor.shape) for tensor in tensors), default=0))
    except ValueError as error:
        raise CheckpointError(f"{path} has a corrupt header: {error}; fetch it again") from error
    return GgufHeader(parts[0], architecture, metadata, tuple(tensors))


def read_arrays(path: Path, keys: Sequence[str]) -> list[tuple[Any, ...]]:
    """Arrays of a file's metadata, however long; empty ones where it has none of the name.

    Raises:
        CheckpointError: the file is truncated or corrupt, or one of these keys is no array.
    """
    metadata = _parse(path, frozenset(keys))[0]
    found = [metadata.get(key, ()) for key in keys]
    for key, value in zip(keys, found, strict=True):
        if not isinstance(value, tuple):
            raise CheckpointError(f"{path} has a corrupt header: {key} is no list; fetch it again")
    return found  # type: ignore[return-value]


def _parts(path: Path, metadata: dict[str, object]) -> tuple[Path, ...]:
    """The files of the model whose part `path` has that metadata."""
    count = metadata.get("split.count", 0)
    if not isinstance(count, int) or count < 2:
        return (path,)
    named = PART.fullmatch(path.name)
    if named is None or int(named["count"]) != count:
        raise CheckpointError(f"{path} is one of the {count} parts of a split model and is not named like one: give "
                              f"all parts the names they were published with, NAME-00001-of-{count:05}.gguf and so on")
    parts = tuple(path.with_name(f"{named['stem']}-{n:05}-of-{count:05}{named['ending']}") for n in range(1, count + 1))
    absent = [part.name for part in parts if not part.exists()]
    if absent:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise CheckpointError(f"{path} is part {int(named['number'])} of {count} of a split model, of which "
                              f"{', '.join(absent[:3])}{more} cannot be found: put all parts into {path.parent}")
    return parts


def _parse(path: Path, whole: frozenset[str] = frozenset()) -> tuple[dict[str, object], list[GgufTensor]]:
    """Metadata and tensors of one file; of the arrays under the keys `whole` all that they hold."""
    if not path.exists():
        raise CheckpointError(f"no GGUF file at {path}")
    with open_input(path) as file:
        fields = _Fields(file)
        if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise CheckpointError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
        try:
            metadata, tensors = _parse_fields(fields, path, whole)
        except EOFError:
            raise CheckpointError(f"{path} is truncated: its header does not end within {fields.size} bytes") from None
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} has a corrupt header: {error}; fetch it again") from error
    end = max((tensor.offset + tensor.nbytes for tensor in tensors), default=0)
    if end > fields.size:
        raise CheckpointError(f"{path} is truncated: expected {end} bytes, the file has {fields.size}")
    return metadata, tensors


def _parse_fields(
    fields: _Fields, path: Path, whole: frozenset[str]
) -> tuple[dict[str, object], list[GgufTensor]]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    version, tensor_count, metadata_count = fields.unpack("<IQQ")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version}, not 2 or 3 in little-endian order")
    metadata: dict[str, object] = {}
    for _ in range(metadata_count):
        key = fields.string()
        metadata[key] = fields.value(fields.unpack("<I"), key in whole)
    rows: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]] = []
    for _ in range(tensor_count):
        name, dims = fields.string(), fields.unpack("<I")
        if dims > MOST_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dims} dimensions, at most {MOST_DIMENSIONS} are possible")
        shape = tuple(fields.unpack("<Q") for _ in range(dims))[::-1]
        kind, offset = fields.unpack("<IQ")
        if kind not in [known.value for known in GGML_QUANT_SIZES]:
            raise ValueError(f"tensor {name!r} has type {kind}, which is none of GGUF's that this release knows")
        block, block_nbytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if not shape or shape[-1] % block:
            raise ValueError(f"tensor {name!r} of shape {shape} is not made of blocks of {block}")
        rows.append((name, shape, GGMLQuantizationType(kind), offset, math.prod(shape) // block * block_nbytes))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment}")
    start = -(-fields.file.tell() // alignment) * alignment
    return metadata, [GgufTensor(name, shape, kind, path, start + at, size) for name, shape, kind, at, size in rows]


def _check_sizes(metadata: dict[str, object], tensors: int, elements: int) -> None:
    """Refuse a count of layers beyond the number of tensors, and lengths beyond the elements of the largest."""
    architecture = metadata.get("general.architecture")
    for name, most, what in (("block_count", tensors, "tensors"),
                             *((name, elements, "elements in the largest tensor") for name in LENGTHS)):
        found = metadata.get(f"{architecture}.{name}")
        for value in found if isinstance(found, tuple) else (found,):
            if isinstance(value, int | float) and not 0 <= value <= most:
                raise ValueError(f"{architecture}.{name} is {value}, but the file has {most} {what}")


def require_readable(tensor: GgufTensor) -> None:
    """Raise CheckpointError, naming tensor and type, for a type whose values the `gguf` package cannot tell."""
    from gguf import GGML_QUANT_SIZES, dequantize

    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[tensor.kind][1]), np.uint8), tensor.kind)
    except NotImplementedError as error:
        raise CheckpointError(f"{tensor.path}: {tensor.name} has type {tensor.kind.name}, which cannot be read; "
                              "quantize the model to another type, Q8_0 say") from error
