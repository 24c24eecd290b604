"""Which tensor of a checkpoint is which weight of a captured model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from forebay.rewriter.checkpoints.checkpoint import Checkpoint, CheckpointError, TensorRecord
from forebay.rewriter.ir.graph import CapturedModel, RowFormat
from forebay.rewriter.ir.program import FileSlice


def weight_files(
    captured: CapturedModel, checkpoint: Checkpoint, prefix: str = "", rename: Callable[[str], str] = str
) -> dict[str, FileSlice]:
    """Where each weight of the model lies in the checkpoint; CheckpointError names the first that is missing or has
    another shape or dtype. `rename` gives today's name of a checkpoint's name, which may also lack, or have on top,
    the base model's `prefix`; a tied weight goes by any of its names.
    """
    records = weight_records(captured, checkpoint, prefix, rename)
    return {name: FileSlice(record.path, record.offset, record.nbytes) for name, record in records.items()}


def with_stored_formats(
    captured: CapturedModel, checkpoint: Checkpoint, prefix: str = "", rename: Callable[[str], str] = str
) -> CapturedModel:
    """`captured` knowing which of its weights the checkpoint holds as packed rows."""
    records = weight_records(captured, checkpoint, prefix, rename)
    weights = {name: replace(spec, stored=_row_format(records[name])) for name, spec in captured.weights.items()}
    return replace(captured, weights=weights)


def _row_format(record: TensorRecord) -> RowFormat | None:
    packed = record.packed
    return None if packed is None else RowFormat(
        packed.format, packed.bits, packed.group_size, packed.scale_dtype, packed.in_features, packed.out_features,
        packed.row_nbytes, packed.dtype, packed.transposed, packed.rows.symmetric)


def weight_records(
    captured: CapturedModel, checkpoint: Checkpoint, prefix: str = "", rename: Callable[[str], str] = str
) -> dict[str, TensorRecord]:
    """The tensor of the checkpoint for each weight of the model by its name there; arguments and errors as of
    `weight_files`."""
    records = {rename(name): record for name, record in checkpoint.tensors.items()}
    found = {}
    for spec in captured.weights.values():
        names = [n for tied in (spec.name, *spec.ties)
                 for n in (tied, f"{prefix}.{tied}", tied.removeprefix(f"{prefix}."))]
        record = next((records[n] for n in names if n in records), None)
        if record is None:
            raise CheckpointError(f"{checkpoint.folder} holds no tensor for {spec.name} "
                                  f"(it has {len(checkpoint.tensors)} tensors): it is a checkpoint of another model")
        shape, dtype = (record.shape, record.dtype) if record.packed is None else (
            record.packed.shape, record.packed.dtype)
        if tuple(shape) != tuple(spec.shape):
            raise CheckpointError(f"{record.path}: {record.name} has shape {list(shape)}, the model's "
                                  f"{spec.name} has {list(spec.shape)}")
        if dtype != spec.dtype:
            raise CheckpointError(f"{record.path}: {record.name} is {str(dtype)[6:]}, the model computes in "
                                  f"{str(spec.dtype)[6:]}; save the checkpoint in that dtype")
        found[spec.name] = record
    return found


def checkpoint_names(config: Any) -> tuple[str, Callable[[str], str]]:
    """For a transformers config: the prefix that checkpoint names may lack, and the renaming of old checkpoint names
    that transformers itself applies when it loads them."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:  # older releases rename nothing in these families
        return kind.base_model_prefix, str
    found = get_checkpoint_conversion_mapping(kind.__name__) or get_checkpoint_conversion_mapping(config.model_type)
    renames = [step for step in found or () if isinstance(step, WeightRenaming)]
    return kind.base_model_prefix, (lambda name: rename_source_key(name, renames, [])[0]) if renames else str
