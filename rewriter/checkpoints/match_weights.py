"""Which tensor of a checkpoint is which weight of a captured model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.rewriter.checkpoints.checkpoint import Checkpoint
from forebay.rewriter.checkpoints.config import meta_model, read_config
from forebay.rewriter.checkpoints.expert_tables import joined_record, piece_names, table_record
from forebay.rewriter.checkpoints.records import CheckpointError, Packed, TensorRecord, log_once
from forebay.rewriter.checkpoints.stored_tensors import require_fits, require_same, same_contents, spellings
from forebay.rewriter.checkpoints.text_model import MULTIMODAL, OTHERS, causal_class, text_config, text_names
from forebay.rewriter.ir.graph import CapturedModel, RowFormat
from forebay.rewriter.ir.program import FileSlice
from forebay.rewriter.one_thread import one_thread

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NAMED = 3  # tensors that a message names
_hearing: list[list[str]] = []
# Buffers that every loader makes anew (transformers' _adjust_missing_and_unexpected_keys).
IGNORED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")


def file_slices(records: Mapping[str, TensorRecord]) -> dict[str, FileSlice]:
    """Return the file slice of each weight, from `weight_records`."""
    return {name: FileSlice(each.path, each.offset, each.nbytes, each.bands) for name, each in records.items()}


def with_stored_formats(captured: CapturedModel, records: Mapping[str, TensorRecord]) -> CapturedModel:
    """`captured` knowing which of its weights are stored as packed rows."""
    weights = {name: replace(spec, stored=row_format(records[name].packed)) for name, spec in captured.weights.items()}
    return replace(captured, weights=weights)


def row_format(packed: Packed | None) -> RowFormat | None:
    return None if packed is None else RowFormat(
        packed.format, packed.bits, packed.group_size, packed.scale_dtype, packed.in_features, packed.out_features,
        packed.row_nbytes, packed.dtype, packed.transposed, packed.rows.symmetric, packed.rows.codebook,
        row_format(packed.down))


def weight_records(
    captured: CapturedModel, checkpoint: Checkpoint, prefix: str = "", rename: Callable[[str], str] = str
) -> dict[str, TensorRecord]:
    """Find the tensor of the checkpoint for each weight of the model.

    Args:
        captured: The model. A tied weight goes by any of its names.
        checkpoint: Where tensors lie.
        prefix: The base model's, which names in the checkpoint may lack or have on top.
        rename: Gives today's name of a checkpoint's name.

    Returns:
        The tensors by the model's names.

    Raises:
        CheckpointError: A weight is missing, has another shape or dtype, or is stored twice with different values.
    """
    by_name: dict[str, list[TensorRecord]] = {}
    for name, record in checkpoint.tensors.items():
        by_name.setdefault(rename(name), []).append(record)
    found = {}
    for spec in captured.weights.values():
        if (added := checkpoint.added.tensors.get(spec.name)) is not None:
            require_fits(added, spec.shape, spec.dtype, spec.name)
            found[spec.name] = added
            continue
        if spec.table is not None and spec.name not in by_name:  # a bundle has tables whole
            found[spec.name] = table_record(spec, by_name, prefix, checkpoint.folder)
            continue
        names = [n for tied in (spec.name, *spec.ties) for n in spellings(tied, prefix)]
        stored = [record for n in dict.fromkeys(names) for record in by_name.get(n, ())]
        if not stored and (joined := joined_record(spec, by_name, prefix, checkpoint.folder)) is not None:
            found[spec.name] = joined
            continue
        if not stored:
            raise CheckpointError(f"{checkpoint.folder} holds no tensor for {spec.name} "
                                  f"(it has {len(checkpoint.tensors)} tensors): it is a checkpoint of another model")
        record, *others = stored
        require_same(record, others)
        require_fits(record, spec.shape, spec.dtype, spec.name)
        found[spec.name] = record
    return found


def read_model_config(folder: Path, checkpoint: Checkpoint, quantized: Iterable[str] = ()) -> PreTrainedConfig:
    """Read the config of a model as its checkpoint has it.

    A config that ties the output head to the embedding is untied where both are stored with different values, as
    transformers does it.

    Args:
        folder: The model's folder.
        checkpoint: Its tensors.
        quantized: Names of weights that another tool quantized, each stored as several tensors. They are never the
            same as another weight.

    Raises:
        CheckpointError: There is no config that makes sense beside the checkpoint.
    """
    config = read_config(folder, checkpoint.tensors)
    if _stored_apart(config, checkpoint, quantized):
        warn_once(f"{folder / 'config.json'} ties the output head to the embedding, and the checkpoint holds both with "
                  "different values: they are taken as they are stored")
        config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = False
    return config


def ties_head(config: Any) -> bool:
    """Return whether a config says that the output head is the embedding."""
    alone = text_config(config)
    return any(getattr(each, "tie_word_embeddings", False) for each in (
        (config, config.get_text_config()) if alone is None else (alone,)))


def _stored_apart(config: Any, checkpoint: Checkpoint, quantized: Iterable[str]) -> bool:
    """Return whether names that the config ties are both stored, with different values."""
    tied: Any = getattr(model_class(config), "_tied_weights_keys", None)
    if not ties_head(config) or not isinstance(tied, Mapping):
        return False
    prefix, rename = checkpoint_names(config)
    records: dict[str, TensorRecord | None] = {rename(name): each for name, each in checkpoint.tensors.items()}
    records |= dict.fromkeys(map(rename, quantized))
    for pair in tied.items():
        stored = [records[n] for name in pair if (n := next((n for n in spellings(name, prefix) if n in records), ""))]
        if len(stored) == 2 and (stored[0] is None or stored[1] is None or not same_contents(stored[0], stored[1])):
            return True
    return False


def unread_tensors(config: PreTrainedConfig, stored: Iterable[str]) -> list[str]:
    """The names among `stored` that the model of `config` has no place for, and that transformers would report."""
    model = meta_model(text_config(config) or config)
    prefix, rename = weight_names(config)
    known = {name for key in model.state_dict() for name in spellings(key, prefix)}
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), *IGNORED]
    left = [name for name in stored if rename(name) not in known and not rename(name).startswith(OTHERS)]
    return [name for name in left if not any(
        re.search(pattern, spelled) for pattern in patterns for spelled in {name, rename(name)})]


def check_unread(config: PreTrainedConfig, checkpoint: Checkpoint, used: Iterable[TensorRecord]) -> None:
    """Report tensors that nobody reads.

    Raises:
        CheckpointError: The checkpoint is quantized: what is left out there changes the values of the rest.
    """
    read = {(each.path, each.offset) for record in used for each in record.made_of or (record,) if each.nbytes}
    left = [name for name, record in checkpoint.tensors.items() if (record.path, record.offset) not in read]
    unread = unread_tensors(config, left) if left else []
    report_unread(checkpoint.folder, unread, any(each.packed is not None for each in checkpoint.tensors.values()))


def report_unread(folder: Path, unread: Sequence[str], quantized: bool) -> None:
    """Log once that nobody reads some tensors; CheckpointError for those of a quantized checkpoint."""
    if not unread:
        return
    more = f" and {len(unread) - NAMED} more" if len(unread) > NAMED else ""
    named, them = f"{', '.join(unread[:NAMED])}{more}", "it" if len(unread) == 1 else "them"
    if quantized:
        raise CheckpointError(f"{folder}: the model has no place for {named}, and the quantized weights may count on "
                              f"{them}: quantize the model that it was made from")
    warn_once(f"{folder}: {named} not read: the model has no place for {them}")


def warn_once(text: str) -> None:
    """Log a warning, the first time that it is due."""
    for heard in _hearing:
        heard.append(text)
    log_once(text)


@contextmanager
def hearing() -> Iterator[list[str]]:
    """The warnings that are due while this is open, whether they were logged before or not."""
    heard: list[str] = []
    _hearing.append(heard)
    try:
        yield heard
    finally:
        _hearing.remove(heard)


@one_thread
def checkpoint_names(config: Any, kind: Any = None) -> tuple[str, Callable[[str], str]]:
    """For a transformers config, and the class of its model (that of language models by default): the prefix that
    checkpoint names may lack, and the renaming of old checkpoint names that transformers itself applies when it loads
    them."""
    kind = kind or model_class(config)
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # older releases rename nothing in these families
        return kind.base_model_prefix, str
    found = get_checkpoint_conversion_mapping(kind.__name__) or get_checkpoint_conversion_mapping(config.model_type)
    renames = [step for step in found or () if isinstance(step, WeightRenaming)]
    of_pieces = piece_names([step for step in found or () if isinstance(step, WeightConverter)])
    if not found:
        return kind.base_model_prefix, str
    return kind.base_model_prefix, lambda name: of_pieces(rename_source_key(name, renames, [])[0] if renames else name)


def weight_names(config: Any) -> tuple[str, Callable[[str], str]]:
    """`checkpoint_names` for the model that is captured, which of a multimodal one is the language model."""
    prefix, rename = checkpoint_names(config)
    if (text := text_config(config)) is None:
        return prefix, rename
    (prefix, within), (_, own) = text_names(config, prefix, rename), checkpoint_names(text)
    return prefix, lambda name: own(within(name))


@one_thread
def model_class(config: Any) -> Any:
    """Return transformers' class for a config: of causal language models, or of multimodal ones; None where it has
    none."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

    if config.model_type in MULTIMODAL:
        found = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
        return found or MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)  # of models that hear
    return causal_class(config)
