"""The tensors of a model's folder as they are quantized: found, matched with the model, read piece by piece."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from forebay.rewriter.checkpoints.adapted import made_of
from forebay.rewriter.checkpoints.checkpoint import Checkpoint, read_tensor
from forebay.rewriter.checkpoints.coded import CodedTensor
from forebay.rewriter.checkpoints.config import meta_model
from forebay.rewriter.checkpoints.expert_sources import StackedTensor, join_pieces
from forebay.rewriter.checkpoints.grouped import GroupedTensor, grouped_tensors
from forebay.rewriter.checkpoints.identity import FileState
from forebay.rewriter.checkpoints.match_weights import (
    read_model_config,
    report_unread,
    ties_head,
    unread_tensors,
    weight_names,
)
from forebay.rewriter.checkpoints.matrices import Matrix
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.packed import is_quantized
from forebay.rewriter.checkpoints.packed_writer import copy_model_files
from forebay.rewriter.checkpoints.records import CheckpointError, TensorRecord
from forebay.rewriter.checkpoints.scheme import quantization_settings, read_scheme, without_quantization
from forebay.rewriter.checkpoints.source_tensor import ReadRows, SourceTensor
from forebay.rewriter.checkpoints.stored_tensors import require_same, spellings
from forebay.rewriter.checkpoints.text_model import text_config
from forebay.rewriter.ir.files import read_input, write_text

PIECE_NBYTES = 4 << 20  # float32 bytes quantized at a time

@dataclass(frozen=True)
class QuantizeSource:
    """A model to quantize: its tensors, the model's first name for each, and the model on the meta device. `prepare`
    writes the model's other files into a folder; `states` are those of the files that are read."""

    tensors: Sequence[SourceTensor]
    names: Mapping[str, str]
    model: Any
    prepare: Callable[[Path], None]
    fingerprint: str
    states: Mapping[str, FileState]


def open_folder_source(path: Path) -> QuantizeSource:
    """Open a folder with a safetensors checkpoint, and match every tensor with the model.

    Raises:
        CheckpointError: A weight is missing, two names of one weight differ, or nobody reads a tensor of a quantized
            checkpoint.
    """
    if made_of(path) is not None:
        raise CheckpointError(f"{path} is a model with an adapter; quantize its base, and name the adapter again")
    if is_quantized(path):
        raise CheckpointError(f"{path} is quantized already; quantize the model it was made from")
    checkpoint = open_checkpoint(path)
    tensors = _file_tensors(checkpoint)
    quantized = [t.name for t in tensors if isinstance(t, GroupedTensor | CodedTensor)]
    config = read_model_config(path, checkpoint, quantized)
    model, naming = _described_model(path, text_config(config) or config), weight_names(config)
    tensors = join_pieces(model, tensors, *naming, path)
    names = _match(model, [tensor.name for tensor in tensors], *naming)

    def prepare(folder: Path) -> None:
        copy_model_files(path, folder)
        without_quantization(folder / "config.json")
        _write_ties(folder / "config.json", model.config)

    return QuantizeSource(_read_ones(checkpoint, (model, config), tensors, names), names, model, prepare,
                          _contents_fingerprint(checkpoint), checkpoint.states)


def _described_model(folder: Path, config: Any) -> Any:
    """The model of a folder on the meta device."""
    try:
        model = meta_model(config)
    except Exception as error:  # whatever the model's own code objects to
        raise CheckpointError(f"{folder}: config.json does not describe a causal language model: {error}") from error
    model.tie_weights()
    return model


def _match(model: Any, stored: Sequence[str], prefix: str, rename: Callable[[str], str]) -> dict[str, str]:
    """For each stored name the first name the model has for that parameter, as far as it has one."""
    first: dict[int, str] = {}
    known: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known[name] = first.setdefault(id(parameter), name)
    names = {}
    for name in stored:
        now = rename(name)
        found = next((n for n in spellings(now, prefix) if n in known), None)
        if found is not None:
            names[name] = known[found]
    return names


def _read_ones(
    checkpoint: Checkpoint, described: tuple[Any, Any], tensors: Sequence[SourceTensor], names: Mapping[str, str]
) -> list[SourceTensor]:
    """The tensors that the model has a place for, once it is known that none is missing and that names of one weight
    hold the same values. Of a quantized checkpoint every tensor must be read: CheckpointError names those left over."""
    folder, (model, config) = checkpoint.folder, described
    missing = [name for name, _ in model.named_parameters() if name not in names.values()]
    if missing:
        raise CheckpointError(f"{folder} holds no tensor for {missing[0]} (it has {len(checkpoint.tensors)} tensors): "
                              "it is a checkpoint of another model, or not the whole of it")
    stored: dict[str, list[SourceTensor]] = {}
    for tensor in tensors:
        if tensor.name in names:
            stored.setdefault(names[tensor.name], []).append(tensor)
    for name, same in stored.items():
        records = [tensor.record for tensor in same if isinstance(tensor, FileTensor)]
        if len(same) > max(1, len(records)):
            raise CheckpointError(f"{folder}: {name} is stored twice, quantized and otherwise; take the wrong one out "
                                  "of the checkpoint")
        for record in records[:1]:
            require_same(record, records[1:])
            if record.opaque:
                raise CheckpointError(f"{record.path}: {record.name} has dtype {record.opaque!r}, which cannot be "
                                      "quantized from; save the checkpoint in float32 or bfloat16")
    unread = set(unread_tensors(config, [tensor.name for tensor in tensors if tensor.name not in names]))
    pieces = [piece for t in tensors for piece in (t.pieces if isinstance(t, StackedTensor) else (t,))]
    quantized = {tensor.name for tensor in pieces if isinstance(tensor, GroupedTensor | CodedTensor)}
    report_unread(folder, [tensor.name for tensor in tensors if tensor.name in unread and not _is_no_bias(
        tensor, quantized)], quantization_settings(folder) is not None)
    if text_config(config) is not None:  # towers are left out
        return [tensor for tensor in tensors if tensor.name in names]
    return [tensor for tensor in tensors if tensor.name not in unread]


def _is_no_bias(tensor: SourceTensor, quantized: Collection[str]) -> bool:
    """Return whether a tensor is the bias of a quantized matrix and all zeros, as AutoGPTQ writes it for layers
    without."""
    module, _, last = tensor.name.rpartition(".")
    return last == "bias" and f"{module}.weight" in quantized and not any(
        bool(piece.any()) for piece in tensor.contents())


def _write_ties(path: Path, config: Any) -> None:
    """Say in a config.json that head and embedding are two weights, where the checkpoint has them apart."""
    if ties_head(config):
        return
    settings = json.loads(read_input(path))
    for each in (settings, settings.get("text_config")):
        if isinstance(each, dict) and each.get("tie_word_embeddings", each is settings):
            each["tie_word_embeddings"] = False
    write_text(path, json.dumps(settings, indent=2) + "\n")


def _file_tensors(checkpoint: Checkpoint) -> list[SourceTensor]:
    """The tensors of a folder in file order, behind those that are quantized, of which several make one."""
    settings, parts = quantization_settings(checkpoint.folder), set[str]()
    made: list[SourceTensor] = []
    if settings is not None:
        grouped, parts = grouped_tensors(checkpoint, read_scheme(settings, checkpoint.folder))
        made += grouped
    ordered = sorted(checkpoint.tensors.values(), key=lambda r: (r.path, r.offset, r.name))
    return made + [FileTensor(record) for record in ordered if record.name not in parts]


def open_rows(tensor: SourceTensor, matrix: Matrix) -> ReadRows:
    """Rows of a matrix's outputs in float32, also where those of all experts lie in two dimensions."""
    if matrix.count and isinstance(tensor, FileTensor):
        tensor = FileTensor(replace(tensor.record, shape=matrix.shape(tensor.shape)))
    return tensor.rows(matrix.transposed)


def _contents_fingerprint(checkpoint: Checkpoint) -> str:
    """The checkpoint's fingerprint with its files' times of change: an interrupted run must not go on with others."""
    times = [[state.mtime_ns, state.ctime_ns] for _, state in sorted(checkpoint.states.items())]
    return hashlib.sha256(f"{checkpoint.fingerprint} {times}".encode()).hexdigest()


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a safetensors file."""

    record: TensorRecord

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.record.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.record.dtype

    def format(self) -> str:
        return ""

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float16

    def nearest(self) -> str:
        return ""

    def contents(self) -> Iterator[torch.Tensor]:
        count = math.prod(self.shape[:-1])
        step = max(1, PIECE_NBYTES * count // max(1, self.record.nbytes))
        return (self._rows(n, min(n + step, count)) for n in range(0, count, step))

    def rows(self, transposed: bool) -> ReadRows:
        if not transposed:
            return lambda lower, upper: self._rows(lower, upper).float()
        inputs, outputs = self.shape[-2:]
        held: dict[int, torch.Tensor] = {}

        def columns(lower: int, upper: int) -> torch.Tensor:
            found = []
            while lower < upper:
                expert, first = divmod(lower, outputs)
                if expert not in held:
                    held.clear()
                    held[expert] = self._rows(expert * inputs, (expert + 1) * inputs).t()
                last = min(first + upper - lower, outputs)
                found.append(held[expert][first:last])
                lower += last - first
            return torch.cat(found).float().contiguous()

        return columns

    def _rows(self, lower: int, upper: int) -> torch.Tensor:
        """Rows [lower, upper) of the last dimension, read from the file."""
        if not self.shape:
            return read_tensor(self.record)
        size = self.shape[-1] * self.record.dtype.itemsize
        return read_tensor(self.record.part(lower * size, (upper - lower) * size, self.record.dtype,
                                            (upper - lower, self.shape[-1])))

    def repacked(self, scale_dtype: torch.dtype | None = None) -> ReadRows:
        raise NotImplementedError(f"{self.name} has no format of its own")
