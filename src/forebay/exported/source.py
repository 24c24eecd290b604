"""The source of an export: captured graphs, and the tensors and files that go with them, from a folder or from
memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from forebay.exported.errors import ExportError
from forebay.open_model import open_model
from forebay.rewriter.capture.language_model import capture_model
from forebay.rewriter.checkpoints import packed
from forebay.rewriter.checkpoints.adapted import ADAPTED
from forebay.rewriter.checkpoints.checkpoint import read_tensor
from forebay.rewriter.checkpoints.expert_tables import table_of
from forebay.rewriter.checkpoints.match_weights import read_model_config, weight_names, weight_records
from forebay.rewriter.checkpoints.module_weights import named_tensors
from forebay.rewriter.checkpoints.packed_writer import PendingTensor, copy_model_files
from forebay.rewriter.checkpoints.quantize_source import FileTensor
from forebay.rewriter.checkpoints.records import CheckpointError, TensorRecord
from forebay.rewriter.checkpoints.resolve import resolve_model
from forebay.rewriter.ir.graph import CapturedModel, Gives

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Source:
    """A model to export. `capture` gives the graphs, as captured, of steps that give something; `items` the weights as
    they are stored, by their names in the graphs, and `tensor` one of them, mapped where it lies in a file; `prepare`
    writes config, tokenizer and generation settings into a folder; `check` raises where the files have changed since;
    `identity` tells models apart."""

    captured: CapturedModel
    capture: Callable[..., CapturedModel]
    items: dict[str, PendingTensor]
    tensor: Callable[[str], torch.Tensor]
    config: PreTrainedConfig
    prepare: Callable[[Path], None]
    check: Callable[[], None]
    identity: str

    def giving(self, gives: Gives) -> CapturedModel:
        return self.captured if gives == self.captured.gives else self.capture(gives=gives)


def open_source(model: str | os.PathLike[str] | torch.nn.Module, gives: Gives = "last") -> Source:
    """A model in memory, or that of a folder, a .gguf file or "demo", whose steps give `gives`; no weight is read."""
    if isinstance(model, torch.nn.Module):
        return _of_module(model, gives)
    folder = resolve_model(model)
    captured, checkpoint, _ = open_model(folder, gives=gives)
    if captured.rewritten:
        raise ExportError(f"{folder} is an exported bundle: copy the folder, or export the model it was made from")
    config = read_model_config(folder, checkpoint)
    records = weight_records(captured, checkpoint, *weight_names(config))
    return Source(captured, lambda gives: open_model(folder, gives=gives)[0],
                  {name: _file_item(name, record) for name, record in records.items()},
                  lambda name: _mapped(records[name]), config,
                  partial(_copy_files, folder), checkpoint.require_unchanged, checkpoint.fingerprint)


def _copy_files(folder: Path, out: Path) -> None:
    copy_model_files(folder, out)
    for name in (packed.MANIFEST, ADAPTED):  # of the source's weights
        (out / name).unlink(missing_ok=True)


def _file_item(name: str, record: TensorRecord) -> PendingTensor:
    return PendingTensor(name, record.dtype, record.shape, lambda: (record.packed, FileTensor(record).contents()))


def _mapped(record: TensorRecord) -> torch.Tensor:
    if not record.nbytes:
        return torch.empty(record.shape, dtype=record.dtype)
    if record.bands:
        return read_tensor(record)
    data = np.memmap(record.path, np.uint8, "c", record.offset, (record.nbytes,))  # no page of it is ever written
    return torch.from_numpy(data).view(record.dtype).reshape(record.shape)


def _of_module(model: Any, gives: Gives) -> Source:
    captured = capture_model(model, gives=gives)
    tensors = named_tensors(model)
    items = {}
    for name, spec in captured.weights.items():
        if spec.table is not None and not any(tensors[each].is_meta for each in spec.table.sources):
            tensors[name] = table_of(spec, tensors)
        tensor = tensors.get(name)
        if tensor is None or tensor.is_meta:
            raise CheckpointError(f"the module's {name} holds no numbers: load its weights before it is exported")
        items[name] = PendingTensor(name, spec.dtype, spec.shape, lambda tensor=tensor: (None, iter([tensor])))  # type: ignore[misc]

    def prepare(folder: Path) -> None:
        model.config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)

    return Source(captured, partial(capture_model, model), items, lambda name: tensors[name].detach(),
                  model.config, prepare, lambda: None, "module")
