"""From what a user names to a captured model and the places of its weights, before any of them is read."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from forebay.exported.bundle import is_bundle, read_bundle
from forebay.kept_graphs import graphs_key, keep_graphs, read_graphs
from forebay.rewriter.checkpoints.adapted import weights_folder
from forebay.rewriter.checkpoints.cast_tensors import in_model_dtypes
from forebay.rewriter.checkpoints.checkpoint import Checkpoint
from forebay.rewriter.checkpoints.match_weights import (
    check_unread,
    file_slices,
    hearing,
    read_model_config,
    unread_tensors,
    weight_names,
    weight_records,
    with_stored_formats,
)
from forebay.rewriter.checkpoints.open_checkpoint import open_checkpoint
from forebay.rewriter.checkpoints.records import CheckpointError, TensorRecord
from forebay.rewriter.checkpoints.resolve import Adapters, resolve_model
from forebay.rewriter.ir.graph import CapturedModel, Gives
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.machine.profile import Machine
from forebay.rewriter.pipeline.rewrite_captured import rewrite_captured
from forebay.rewriter.switches import Switches, read_switches
from forebay.runtime.measure.kept import kept_machine

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LOG = logging.getLogger("forebay")
_guessed = False  # whether it has been told


def open_model(
    model: str | os.PathLike[str], *, gives: Gives = "last", verify: bool = False, dequantize: bool = False,
    embeds: bool = False, keep: bool = False, adapter: Adapters | None = None,
) -> tuple[CapturedModel, Checkpoint, dict[str, FileSlice]]:
    """Capture a model from its folder (or "demo", a GGUF file, or a name on the Hub) and find its weights, without
    reading any; a bundle's graphs are read. `gives` and `embeds` say what its steps give and take (`capture_model`);
    with `verify` every weight is read once all the same, and compared with its checksum (`open_checkpoint`); with
    `dequantize` a GGUF file's weights are float32, and an `adapter` is added (`resolve_model`). With `keep` the graphs
    are rewritten, with a native cache, and the cache folder keeps them: the next call captures nothing."""
    folder = resolve_model(model, dequantize=dequantize, adapter=adapter)
    if is_bundle(folder):
        if embeds:
            raise CheckpointError(f"{folder} is a bundle, whose steps take ids alone: give ids, or open the folder it "
                                  "was made of")
        return read_bundle(folder, gives=gives, verify=verify)
    checkpoint = open_checkpoint(folder, verify=verify)
    return open_graphs(folder, checkpoint, gives=gives, dequantize=dequantize, embeds=embeds, keep=keep)


def open_graphs(
    folder: Path, checkpoint: Checkpoint, *, gives: Gives = "last", dequantize: bool = False, embeds: bool = False,
    keep: bool = False,
) -> tuple[CapturedModel, Checkpoint, dict[str, FileSlice]]:
    """Capture the model of an opened checkpoint, as `open_model` does."""
    keep = keep and read_switches() == Switches()
    key = graphs_key(folder, checkpoint, (gives, embeds, dequantize)) if keep else None
    if key is not None and (kept := read_graphs(key)) is not None and all(
            map(os.path.exists, {each.path for each in kept[1].values()})):  # copies in the cache may be deleted
        return kept[0], checkpoint, kept[1]
    from forebay.rewriter.capture.language_model import capture_model

    with hearing() as said:
        config = read_model_config(folder, checkpoint)
        captured = capture_model(config, dtype=_checkpoint_dtype(checkpoint, config), gives=gives, embeds=embeds,
                                 added=checkpoint.added)
        names = weight_names(config)
        checkpoint = in_model_dtypes(captured, checkpoint, *names)
        records = weight_records(captured, checkpoint, *names)
        check_unread(config, checkpoint, records.values())
    captured, files = with_stored_formats(captured, records), file_slices(records)
    if key is not None:
        captured = replace(rewrite_captured(captured, Switches()), kept_as=key)
        keep_graphs(key, captured, files, said)
    return captured, checkpoint, files


def capture_folder(folder: Path, gives: Gives, embeds: bool = False) -> CapturedModel:
    """The model of a folder as `open_model` captures it, alone."""
    return open_model(folder, gives=gives, embeds=embeds)[0]


def known_machine(folder: Path) -> Machine:
    """The profile that is kept of this machine, or a cautious guess, which a warning tells of once."""
    global _guessed
    kept = kept_machine(weights_folder(folder))
    if kept is None and not _guessed:
        _guessed = True
        LOG.warning("this machine was never measured, so plans go by a cautious guess of its speed; `forebay machine` "
                    "measures it once")
    return kept or Machine.default()


def _checkpoint_dtype(checkpoint: Checkpoint, config: PreTrainedConfig) -> torch.dtype:
    """The floating dtype that most bytes of the model's weights have."""
    sizes = _dtype_sizes(checkpoint.tensors.values())
    if not sizes:
        raise CheckpointError(f"{checkpoint.folder} holds no tensor of floating-point numbers: not a language model's")
    if len(sizes) > 1:
        with contextlib.suppress(Exception):  # `capture_model` names what the model's own code objects to
            unread = set(unread_tensors(config, checkpoint.tensors))
            sizes = _dtype_sizes(r for name, r in checkpoint.tensors.items() if name not in unread) or sizes
    return max(sizes, key=lambda d: sizes[d])


def _dtype_sizes(records: Iterable[TensorRecord]) -> dict[torch.dtype, int]:
    """Bytes of tensors by their floating dtype; of quantized ones by that of the model."""
    sizes: dict[torch.dtype, int] = {}
    for record in records:
        dtype = record.dtype if record.packed is None else record.packed.dtype
        if dtype.is_floating_point:
            sizes[dtype] = sizes.get(dtype, 0) + record.nbytes
    return sizes
