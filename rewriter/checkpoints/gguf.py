"""GGUF to safetensors, one tensor at a time, with the values transformers gives for `gguf_file=`."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import struct
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from forebay.rewriter.checkpoints.checkpoint import SINGLE, CheckpointError, Progress, Spec
from forebay.rewriter.checkpoints.config import LOCAL_ONLY, meta_model
from forebay.rewriter.checkpoints.gguf_config import (
    ROPE_FREQS,
    ROPE_LONG,
    ROPE_SHORT,
    alone,
    described,
    read_gguf_config,
)
from forebay.rewriter.checkpoints.identity import changed_file, file_states
from forebay.rewriter.checkpoints.write_tensors import require_free, write_tensors

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType
    from transformers import PreTrainedModel

# Those in which every GGUF tensor is one parameter of the transformers model.
ARCHITECTURES = ("gemma2", "gemma3", "gpt2", "llama", "nemotron", "phi3", "qwen2", "qwen3", "stablelm", "starcoder2")
OUTPUT_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Metadata value types, from https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: scalars as `struct` has them.
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
MOST_DIMENSIONS = 4  # as the format has it
# What a tensor's dimensions bound, of the sizes in the metadata; the layers are bounded by the number of tensors.
LENGTHS = ("embedding_length", "feed_forward_length", "vocab_size", "attention.head_count", "attention.head_count_kv",
           "attention.key_length", "attention.value_length", "expert_count")


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
    bytes in all). Names and permutations come from transformers' own GGUF loader, so in float32 the result equals
    `from_pretrained(gguf_file=...)` bit for bit. Raises CheckpointError for an unknown architecture, a truncated or
    corrupt file, a full disk, or an `out_folder` that is already there.
    """
    path, out = Path(path).expanduser(), Path(out_folder).expanduser()
    if dtype not in OUTPUT_DTYPES:
        raise CheckpointError(f"dtype {dtype!r}: choose one of {', '.join(OUTPUT_DTYPES)}")
    if out.exists():
        raise CheckpointError(f"{out} is already there: remove it or name another folder")
    for package in ("gguf", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise CheckpointError(f"reading GGUF files needs {package}: pip install 'forebay[models]'")
    states = file_states([str(path)]) if path.is_file() else {}
    header = _read_header(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    # before anything is written: a tokenizer that does not fit is an error of whatever kind its library has
    require_free(out.parent, sum(math.prod(t.shape) for t in header.tensors) * OUTPUT_DTYPES[dtype].itemsize)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        model = _write_config(path, header, partial, OUTPUT_DTYPES[dtype])
        _write_weights(path, header, model, partial, OUTPUT_DTYPES[dtype], progress)
        if changed_file(states):
            raise CheckpointError(f"{path} was changed while it was being converted; try again when nobody writes it")
        partial.chmod(0o755)  # mkdtemp makes it private
        try:
            partial.rename(out)
        except OSError as error:
            raise CheckpointError(f"{out} appeared during the conversion: another process made it") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]  # slowest dimension first, as torch has it
    kind: GGMLQuantizationType
    offset: int  # absolute, bytes
    nbytes: int


@dataclass(frozen=True)
class _Header:
    architecture: str
    metadata: dict[str, object]  # arrays are None
    tensors: tuple[_Tensor, ...]


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
        data = self.file.read(struct.calcsize(form))
        if len(data) < struct.calcsize(form):
            raise EOFError
        values = struct.unpack(form, data)
        return values[0] if len(values) == 1 else values

    def string(self) -> str:
        length = self.unpack("<Q")
        if self.file.tell() + length > self.size:
            raise EOFError
        return self.file.read(length).decode()

    def value(self, kind: int) -> object:
        """A string or a number; an array is stepped over and gives None."""
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, count = self.unpack("<IQ")
            if inner in SCALARS:
                self.skip(count * struct.calcsize(SCALARS[inner]))
            else:
                for _ in range(count):
                    self.skip(self.unpack("<Q")) if inner == STRING else self.value(inner)
        elif kind in SCALARS:
            return self.unpack(SCALARS[kind])
        else:
            raise ValueError(f"unknown metadata type {kind}")
        return None


def _read_header(path: Path) -> _Header:
    if not path.is_file():
        raise CheckpointError(f"no GGUF file at {path}")
    with open(path, "rb") as file:
        fields = _Fields(file)
        if file.read(4) != b"GGUF":
            raise CheckpointError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
        try:
            header = _parse(fields)
        except EOFError:
            raise CheckpointError(f"{path} is truncated: its header does not end within {fields.size} bytes") from None
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} has a corrupt header: {error}; fetch it again") from error
    if header.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{path} has GGUF architecture {header.architecture!r}; those converted are {known}")
    end = max((tensor.offset + tensor.nbytes for tensor in header.tensors), default=0)
    if end > fields.size:
        raise CheckpointError(f"{path} is truncated: expected {end} bytes, the file has {fields.size}")
    return header


def _parse(fields: _Fields) -> _Header:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    version, tensor_count, metadata_count = fields.unpack("<IQQ")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version}, not 2 or 3 in little-endian order")
    metadata: dict[str, object] = {}
    for _ in range(metadata_count):
        key = fields.string()
        metadata[key] = fields.value(fields.unpack("<I"))
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
    if len({row[0] for row in rows}) != len(rows):
        raise ValueError("two tensors have one name")
    _check_sizes(metadata, len(rows), max((math.prod(row[1]) for row in rows), default=0))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment}")
    start = -(-fields.file.tell() // alignment) * alignment
    tensors = tuple(_Tensor(name, shape, kind, start + offset, size) for name, shape, kind, offset, size in rows)
    return _Header(str(metadata.get("general.architecture")), metadata, tensors)


def require_readable(path: Path, tensor: _Tensor) -> None:
    """Raise CheckpointError, naming tensor and type, for a type whose values the `gguf` package cannot tell."""
    from gguf import GGML_QUANT_SIZES, dequantize

    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[tensor.kind][1]), np.uint8), tensor.kind)
    except NotImplementedError as error:
        raise CheckpointError(f"{path}: {tensor.name} has type {tensor.kind.name}, which cannot be read; quantize the "
                              "model to another type, Q8_0 say") from error


def _check_sizes(metadata: dict[str, object], tensors: int, elements: int) -> None:
    """Refuse a count of layers beyond the number of tensors, and lengths beyond the elements of the largest."""
    architecture = metadata.get("general.architecture")
    for name, most, what in (("block_count", tensors, "tensors"),
                             *((name, elements, "elements in the largest tensor") for name in LENGTHS)):
        found = metadata.get(f"{architecture}.{name}")
        if isinstance(found, int | float) and not 0 <= found <= most:
            raise ValueError(f"{architecture}.{name} is {found}, but the file has {most} {what}")


def _write_config(path: Path, header: _Header, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Write all that is not a weight; the model it describes, on the meta device."""
    from transformers import AutoTokenizer, GenerationConfig

    with described(path):
        config = read_gguf_config(path, header)
        model = meta_model(config)
        with alone(path) as only:
            if "tokenizer.ggml.tokens" in header.metadata:
                AutoTokenizer.from_pretrained(only, gguf_file=path.name, **LOCAL_ONLY).save_pretrained(folder)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    return model


def _write_weights(
    path: Path,
    header: _Header,
    model: PreTrainedModel,
    folder: Path,
    dtype: torch.dtype,
    progress: Progress | None,
) -> None:
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=model.config.to_dict())
    # Without children: asking each submodule again costs 5 s at 30 layers and adds only bare models' names.
    flat = SimpleNamespace(config=model.config, state_dict=model.state_dict, named_children=tuple)
    names = get_gguf_hf_weights_map(flat, processor)
    sources = {names[tensor.name]: tensor for tensor in header.tensors if tensor.name in names}
    known = {*names, ROPE_FREQS, ROPE_SHORT, ROPE_LONG}
    ignored = [tensor.name for tensor in header.tensors if tensor.name not in known]
    if ignored:
        warnings.warn(f"{path}: tensors without a place in {type(model).__name__} are ignored: {ignored}", stacklevel=3)

    parameters = model.state_dict(keep_vars=True)
    stored = {id(parameters[name]) for name in sources}  # a tied parameter is one object under several names
    missing = [name for name, value in parameters.items() if id(value) not in stored]
    if missing:
        raise CheckpointError(f"{path} is incomplete: no tensor for {', '.join(missing[:5])} ({len(missing)} in all)")
    specs: list[Spec] = []
    for name, value in parameters.items():
        if name not in sources:
            continue
        require_readable(path, sources[name])
        if math.prod(sources[name].shape) != value.numel():
            source, target = sources[name], tuple(value.shape)
            raise CheckpointError(f"{path}: {source.name} is {source.shape}, but {name} of this model is {target}")
        specs.append((name, dtype, tuple(value.shape)))

    def read(name: str) -> torch.Tensor:
        return _dequantize(path, sources[name], processor).to(dtype)

    fd = os.open(folder / SINGLE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        write_tensors(fd, folder.parent, specs, read, metadata={"format": "pt"}, progress=progress)
    finally:
        os.close(fd)


def _dequantize(path: Path, tensor: _Tensor, processor: Any) -> torch.Tensor:
    """One tensor in float32, permuted as the transformers model has it."""
    from gguf import dequantize, quant_shape_to_byte_shape

    data = np.fromfile(path, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)
    values = dequantize(data.reshape(quant_shape_to_byte_shape(tensor.shape, tensor.kind)), tensor.kind)
    taken: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}
    result = processor.process(values, tensor.name, tensor_key_mapping={}, parsed_parameters=taken)
    if result.name is None:  # the processor stored it itself, as GPT-2's does with an untied head
        (out,) = taken["tensors"].values()
        return out
    return torch.from_numpy(result.weights)
