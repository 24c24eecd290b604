"""Quantise a model's weights, tensor by tensor, into a quantised checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from forebay.kernels.formats import packing
from forebay.kernels.formats.row_sizes import product_refusal
from forebay.kernels.formats.table import symmetric_name
from forebay.kernels.quantization.quantize.operator import quantize
from forebay.kernels.quantization.quantize.reference import ROUNDINGS
from forebay.rewriter.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointError,
    Progress,
    TensorRecord,
    open_checkpoint,
    read_tensor,
)
from forebay.rewriter.checkpoints.config import meta_model, write_dtype
from forebay.rewriter.checkpoints.grouped import (
    GroupedTensor,
    grouped_tensors,
    quantization_settings,
    read_scheme,
    without_quantization,
)
from forebay.rewriter.checkpoints.identity import FileState, changed_file, file_states
from forebay.rewriter.checkpoints.match_weights import (
    checkpoint_names,
    read_model_config,
    require_same,
    spellings,
    unread_in_quantized,
    unread_tensors,
    warn_once,
)
from forebay.rewriter.checkpoints.packed import NATIVE, Packed, is_quantized, parse_format
from forebay.rewriter.checkpoints.packed_writer import (
    SHARD_NBYTES,
    PendingTensor,
    Pieces,
    copy_model_files,
    write_quantized,
)

KEEP = "keep"  # each GGUF matrix in the format it has
PIECE_NBYTES = 4 << 20  # float32 bytes quantised at a time

ReadRows = Callable[[int, int], torch.Tensor]  # rows [lower, upper)


class SourceTensor(Protocol):
    """One tensor of the model to be quantised, with `shape` and `dtype` as the model has it."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def format(self) -> str:
        """The weight format that holds its values exactly as they lie in the source, or ""."""

    @property
    def scale_dtype(self) -> torch.dtype:
        """What the scales and lows of `repacked` rows are of."""

    def nearest(self) -> str:
        """The weight format to round it to where it is quantised in a way that none holds exactly, or ""."""

    def contents(self) -> Iterator[torch.Tensor]:
        """All of it, in pieces, in the model's own order."""

    def rows(self, transposed: bool) -> ReadRows:
        """Its rows in float32; with `transposed`, its columns."""

    def repacked(self) -> ReadRows:
        """Its rows (of outputs) in the layout of `packing`, bit for bit, in the format that `format` names."""


@dataclass(frozen=True)
class Matrix:
    """What a weight matrix is to the model: the names it goes by, its role, and whether it lies as [inputs, outputs].

    Roles: `linear`; `head`, the output head; `embedding`, of tokens; `tied`, both of these; `table`, looked up by
    something else than tokens.
    """

    names: tuple[str, ...]
    role: str
    transposed: bool = False


@dataclass(frozen=True)
class Wish:
    """What is asked: a format for all matrices of linear layers, exceptions by name pattern, later ones winning, and
    whether the output head and the token embedding are included; `head_format` is another for the head. The rounding
    "symmetric" means the symmetric ones of all these formats, which are always rounded so. `dtype`: what the model is
    to compute in, None for what its weights are stored in."""

    weights: str
    overrides: tuple[tuple[str, str], ...] = ()
    rounding: str = "minmax"
    head: bool = False
    embeddings: bool = False
    head_format: str = ""
    dtype: torch.dtype | None = None


def quantize_model(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    wish: Wish,
    *,
    shard_nbytes: int = SHARD_NBYTES,
    progress: Progress | None = None,
) -> Checkpoint:
    """Write the model in the folder or GGUF file `model`, quantised, to the folder `out`, and open it.

    Holds pieces of a few MiB; of a transposed tensor the whole. Quantised GGUF tensors keep their codes where the
    format of their own grid is wished (`gguf_blocks`; `keep` wishes it for all).
    Interrupted, the same call goes on where it stopped. `progress` is called with (bytes written, bytes in all).
    Raises CheckpointError for formats, names and patterns that mean nothing, and as `write_quantized` does.
    """
    path, out = Path(model).expanduser(), Path(out).expanduser()
    _check(wish, path)
    tensors: Sequence[SourceTensor]
    states: Mapping[str, FileState]
    if path.suffix == ".gguf":
        from forebay.rewriter.checkpoints.gguf_repack import open_gguf

        states = file_states([str(path)]) if path.is_file() else {}
        source = open_gguf(path)
        tensors, skeleton, prepare, fingerprint = source.tensors, source.model, source.write_files, source.fingerprint
        names = {tensor.name: tensor.name for tensor in tensors}
    else:
        checkpoint, skeleton = _open_folder(path)
        tensors = _file_tensors(checkpoint)
        names = _match(skeleton, [tensor.name for tensor in tensors])
        tensors = _read_ones(checkpoint, skeleton, tensors, names)
        fingerprint, states = _contents_fingerprint(checkpoint), checkpoint.states

        def prepare(folder: Path) -> None:
            copy_model_files(path, folder)
            without_quantization(folder / "config.json")
            _write_ties(folder / "config.json", skeleton.config)

    matrices = find_matrices(skeleton)
    for tensor in tensors:
        if isinstance(tensor, GroupedTensor) and getattr(matrices.get(names.get(tensor.name, "")), "transposed", False):
            raise CheckpointError(f"{path}: {tensor.name} is a quantised matrix that the model has transposed "
                                  "(Conv1D), which is not read; quantise the model it was made from")
    formats = choose_formats(tensors, names, matrices, wish)
    items = [_item(t, formats[t.name], matrices[names[t.name]] if formats[t.name] != NATIVE else None, wish)
             for t in tensors if t.name in formats]
    settings = {"source": fingerprint, "formats": formats, "rounding": wish.rounding}
    if wish.dtype is not None:
        settings["dtype"] = str(wish.dtype)

    def check() -> None:
        changed = changed_file(states)
        if changed is not None:
            raise CheckpointError(f"{changed} was changed while it was being quantised; quantise into a "
                                  "new folder when nobody writes to it")

    def prepare_all(folder: Path) -> None:
        prepare(folder)
        if wish.dtype is not None:
            write_dtype(folder / "config.json", wish.dtype)

    return write_quantized(out, items, settings, prepare_all, shard_nbytes=shard_nbytes, progress=progress, check=check)


def find_matrices(model: nn.Module) -> dict[str, Matrix]:
    """The weight matrices of linear layers and embeddings, by the first name of each; a tied one is one."""
    from transformers.pytorch_utils import Conv1D

    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    found = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(module, nn.Linear | nn.Embedding | Conv1D) or not isinstance(weight, nn.Parameter):
            continue
        looked_up, is_head = weight is embedding.weight, head is not None and weight is head.weight
        role = "tied" if looked_up and is_head else "embedding" if looked_up else "head" if is_head else (
            "table" if isinstance(module, nn.Embedding) else "linear")
        known = tuple(names[id(weight)])
        found[known[0]] = Matrix(known, role, isinstance(module, Conv1D))
    return found


def choose_formats(
    tensors: Sequence[SourceTensor], names: Mapping[str, str], matrices: Mapping[str, Matrix], wish: Wish
) -> dict[str, str]:
    """The format of each tensor by its name in the source; `names` gives the model's first name for each.

    A second copy of a tied weight is left out. CheckpointError names the first pattern that matches no matrix.
    """
    asked = {"linear", *(("head", "tied") if wish.head else ()), *(("embedding", "tied") if wish.embeddings else ())}
    formats: dict[str, str] = {}
    unused = [pattern for pattern, _ in wish.overrides]
    taken: set[str] = set()
    for tensor in tensors:
        name = names.get(tensor.name, tensor.name)
        if name in taken:
            continue
        taken.add(name)
        matrix = matrices.get(name)
        if matrix is None:
            formats[tensor.name] = NATIVE
            continue
        format = wish.weights if matrix.role in asked else NATIVE
        if wish.head_format and matrix.role in asked & {"head", "tied"}:
            format = wish.head_format
        for pattern, other in wish.overrides:
            if any(fnmatchcase(known, pattern) for known in (tensor.name, *matrix.names)):
                format = other
                unused = [p for p in unused if p != pattern]
        if format == KEEP:
            format = tensor.format() or tensor.nearest() or NATIVE
        elif wish.rounding == "symmetric":
            format = symmetric_name(format)
        if format != NATIVE:
            _refuse_unread(format, tensor.shape[0 if matrix.transposed else 1], tensor.name)
        formats[tensor.name] = format
    if unused:
        known = ", ".join(list(matrices)[:3])
        raise CheckpointError(f"the override pattern {unused[0]!r} matches no weight matrix; names are like {known}")
    return formats


def _check(wish: Wish, path: Path) -> None:
    for format in (wish.weights, wish.head_format or NATIVE, *(format for _, format in wish.overrides)):
        if format == KEEP and path.suffix != ".gguf" and quantization_settings(path) is None:
            raise CheckpointError(f"the format {KEEP!r} is for GGUF files and others whose weights are quantised "
                                  f"already; {path} is none: name a format such as w4g64")
        if format not in (NATIVE, KEEP):
            _refuse_unread(format)
    if wish.rounding not in ROUNDINGS:
        raise CheckpointError(f"no rounding {wish.rounding!r}; there are {', '.join(ROUNDINGS)}")


def _refuse_unread(format: str, inputs: int = 0, name: str = "") -> None:
    """CheckpointError for rows that no product reads: of `inputs` values, or, where that is 0, of any number."""
    refusal = product_refusal(inputs, parse_format(format).group_size)
    if refusal:
        of, keep = (f" for {name!r}", f", or --override {name}={NATIVE}") if name else ("", "")
        raise CheckpointError(f"the format {format!r}{of} is one that no kernel reads: {refusal}; name w4g32 or w8g32"
                              f"{keep}")


def _open_folder(folder: Path) -> tuple[Checkpoint, Any]:
    """The checkpoint of a folder, and its model on the meta device."""
    if is_quantized(folder):
        raise CheckpointError(f"{folder} is quantised already; quantise the model it was made from")
    checkpoint = open_checkpoint(folder)
    config = read_model_config(folder, checkpoint)
    try:
        model = meta_model(config)
    except Exception as error:  # whatever the model's own code objects to
        raise CheckpointError(f"{folder}: config.json does not describe a causal language model: {error}") from error
    model.tie_weights()
    return checkpoint, model


def _match(model: Any, stored: Sequence[str]) -> dict[str, str]:
    """For each stored name the first name the model has for that parameter, as far as it has one."""
    prefix, rename = checkpoint_names(model.config)
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
    checkpoint: Checkpoint, model: Any, tensors: Sequence[SourceTensor], names: Mapping[str, str]
) -> list[SourceTensor]:
    """The tensors that the model has a place for, once it is known that none is missing and that names of one weight
    hold the same values. Of a quantized checkpoint every tensor must be read: CheckpointError names those left over."""
    folder = checkpoint.folder
    missing = [name for name, _ in model.named_parameters() if name not in names.values()]
    if missing:
        raise CheckpointError(f"{folder} holds no tensor for {missing[0]} (it has {len(checkpoint.tensors)} tensors): "
                              "it is a checkpoint of another model, or not the whole of it")
    stored: dict[str, list[TensorRecord]] = {}
    for tensor in tensors:
        if isinstance(tensor, FileTensor) and tensor.name in names:
            stored.setdefault(names[tensor.name], []).append(tensor.record)
    for record, *others in stored.values():
        require_same(record, others)
    unread = unread_tensors(model.config, [tensor.name for tensor in tensors if tensor.name not in names])
    if unread and quantization_settings(folder) is not None:
        raise CheckpointError(unread_in_quantized(folder, unread))
    if unread:
        warn_once(f"{folder}: the model has no place for {', '.join(unread)}: left out")
    return [tensor for tensor in tensors if tensor.name not in unread]


def _write_ties(path: Path, config: Any) -> None:
    """Say in a config.json that head and embedding are two weights, where the checkpoint has them apart."""
    if config.get_text_config().tie_word_embeddings:
        return
    settings = json.loads(path.read_bytes())
    for each in (settings, settings.get("text_config")):
        if isinstance(each, dict) and each.get("tie_word_embeddings", each is settings):
            each["tie_word_embeddings"] = False
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _file_tensors(checkpoint: Checkpoint) -> list[SourceTensor]:
    """The tensors of a folder in file order, behind those that are quantised, of which several make one."""
    settings, parts = quantization_settings(checkpoint.folder), set[str]()
    made: list[SourceTensor] = []
    if settings is not None:
        grouped, parts = grouped_tensors(checkpoint, read_scheme(settings, checkpoint.folder))
        made += grouped
    ordered = sorted(checkpoint.tensors.values(), key=lambda r: (r.path, r.offset, r.name))
    return made + [FileTensor(record) for record in ordered if record.name not in parts]


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
        if self.record.opaque:
            raise CheckpointError(f"{self.record.path}: {self.name} has dtype {self.record.opaque!r}, which cannot be "
                                  "quantized from; save the checkpoint in float32 or bfloat16")
        return self.record.dtype

    def format(self) -> str:
        return ""

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float16

    def nearest(self) -> str:
        return ""

    def contents(self) -> Iterator[torch.Tensor]:
        count = self.shape[0] if self.shape else 1
        step = max(1, PIECE_NBYTES * count // max(1, self.record.nbytes))
        return (self._rows(n, min(n + step, count)) for n in range(0, count, step))

    def rows(self, transposed: bool) -> ReadRows:
        if not transposed:
            return lambda lower, upper: self._rows(lower, upper).float()
        whole = read_tensor(self.record).t()
        return lambda lower, upper: whole[lower:upper].float().contiguous()

    def _rows(self, lower: int, upper: int) -> torch.Tensor:
        """Entries [lower, upper) of the first dimension, read from the file."""
        if not self.shape:
            return read_tensor(self.record)
        size = self.record.nbytes // max(1, self.shape[0])
        return read_tensor(replace(self.record, offset=self.record.offset + lower * size, nbytes=(upper - lower) * size,
                                   shape=(upper - lower, *self.shape[1:])))

    def repacked(self) -> ReadRows:
        raise NotImplementedError(f"{self.name} has no format of its own")


def _item(tensor: SourceTensor, format: str, matrix: Matrix | None, wish: Wish) -> PendingTensor:
    dtype = wish.dtype if wish.dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
    if matrix is None:
        return PendingTensor(tensor.name, dtype, tensor.shape,
                             lambda: (None, (piece.to(dtype) for piece in tensor.contents())))
    stored = parse_format(format)
    bits, group_size, rounding = stored.bits, stored.group_size, "symmetric" if stored.symmetric else wish.rounding
    outer, inner = tensor.shape
    inputs, outputs = (outer, inner) if matrix.transposed else (inner, outer)
    width = stored.row_nbytes(inputs, dtype.itemsize)
    step = max(1, PIECE_NBYTES // (4 * inputs))

    def packed(scale_dtype: torch.dtype) -> Packed:
        return Packed(format, bits, group_size, scale_dtype, (outer, inner), dtype, matrix.transposed)

    def pieces() -> Pieces:
        if tensor.format() == format:
            read = tensor.repacked()
            return packed(tensor.scale_dtype), (read(n, min(n + step, outputs)) for n in range(0, outputs, step))
        rows = tensor.rows(matrix.transposed)
        scale_dtype = _scale_dtype(tensor.name, rows, outputs, step)

        def piece(n: int) -> torch.Tensor:
            codes, scale, low = quantize(rows(n, min(n + step, outputs)), bits, group_size, -1, scale_dtype, rounding)
            return packing.pack_rows(codes, scale, None if stored.symmetric else low)

        return packed(scale_dtype), map(piece, range(0, outputs, step))

    return PendingTensor(tensor.name, torch.uint8, (outputs, width), pieces)


def _scale_dtype(name: str, rows: ReadRows, outputs: int, step: int) -> torch.dtype:
    """fp16, or bf16 for a matrix with values that fp16 cannot hold."""
    most = 0.0
    for n in range(0, outputs, step):
        piece = rows(n, min(n + step, outputs))
        if not piece.isfinite().all():
            raise CheckpointError(f"{name!r} holds NaN or infinity and cannot be quantised; keep it with --override "
                                  f"{name}={NATIVE}")
        most = max(most, float(piece.abs().max()) if piece.numel() else 0.0)
    return torch.float16 if 2 * most <= torch.finfo(torch.float16).max else torch.bfloat16
