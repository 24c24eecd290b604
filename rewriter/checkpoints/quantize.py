"""Quantize a model's weights, tensor by tensor, into a quantized checkpoint."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from forebay.kernels.formats.codebooks import GRIDS
from forebay.kernels.formats.row_sizes import product_refusal
from forebay.kernels.formats.table import symmetric_name
from forebay.kernels.quantization.quantize.reference import ROUNDINGS
from forebay.rewriter.checkpoints.checkpoint import Checkpoint, Progress, is_gguf
from forebay.rewriter.checkpoints.coded import CodedTensor
from forebay.rewriter.checkpoints.config import write_dtype
from forebay.rewriter.checkpoints.grouped import GroupedTensor
from forebay.rewriter.checkpoints.identity import changed_file
from forebay.rewriter.checkpoints.matrices import Matrix, find_matrices
from forebay.rewriter.checkpoints.mixed_formats import Mixture, choose_mixture
from forebay.rewriter.checkpoints.packed import NATIVE
from forebay.rewriter.checkpoints.packed_writer import (
    SHARD_NBYTES,
    PendingTensor,
    Pieces,
    begun_settings,
    write_quantized,
)
from forebay.rewriter.checkpoints.quantize_source import (
    PIECE_NBYTES,
    QuantizeSource,
    open_folder_source,
    open_rows,
)
from forebay.rewriter.checkpoints.records import CheckpointError, Packed, parse_format
from forebay.rewriter.checkpoints.rounding import fitting_scale_dtype, pack_values
from forebay.rewriter.checkpoints.scheme import quantization_settings
from forebay.rewriter.checkpoints.source_tensor import ReadRows, SourceTensor

KEEP = "keep"  # each GGUF matrix in the format it has
MIXED = "mixed"  # each matrix in the format that `Wish.mixture` leads to


@dataclass(frozen=True)
class Wish:
    """The requested formats: a format for all matrices of linear layers, exceptions by name pattern, later ones
    winning, and whether the output head and the token embedding are included; `head_format` is another for the head.
    The rounding "symmetric" means the symmetric ones of all these formats, which are always rounded so. `dtype`: what
    the model is to compute in, None for what its weights are stored in."""

    weights: str
    overrides: tuple[tuple[str, str], ...] = ()
    rounding: str = "minmax"
    head: bool = False
    embeddings: bool = False
    head_format: str = ""
    dtype: torch.dtype | None = None
    mixture: Mixture | None = None  # with the format "mixed"


def quantize_model(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    wish: Wish,
    *,
    shard_nbytes: int = SHARD_NBYTES,
    progress: Progress | None = None,
) -> Checkpoint:
    """Write the model in the folder or GGUF file `model`, quantized, to the folder `out`, and open it.

    Holds pieces of a few MiB; of a transposed tensor the whole. Quantized GGUF tensors keep their codes where the
    format of their own grid is wished (`gguf_blocks`; `keep` wishes it for all).
    Interrupted, the same call goes on where it stopped. `progress` is called with (bytes written, bytes in all).
    Raises CheckpointError for formats, names and patterns that mean nothing, and as `write_quantized` does.
    """
    path, out = Path(model).expanduser(), Path(out).expanduser()
    _check(wish, path)
    if is_gguf(path):
        from forebay.rewriter.checkpoints.gguf_repack import open_gguf

        gguf = open_gguf(path)
        source = QuantizeSource(gguf.tensors, {t.name: t.name for t in gguf.tensors}, gguf.model, gguf.write_files,
                                gguf.fingerprint, gguf.states)
    else:
        source = open_folder_source(path)
    tensors, names = source.tensors, source.names
    matrices = find_matrices(source.model)
    for tensor in tensors:
        turned = getattr(matrices.get(names.get(tensor.name, "")), "transposed", False)
        if turned and isinstance(tensor, GroupedTensor | CodedTensor):
            raise CheckpointError(f"{path}: {tensor.name} is a quantized matrix that the model has transposed "
                                  "(Conv1D), which is not read; quantize the model it was made from")
    formats = choose_formats(tensors, names, matrices, wish)
    settings: dict[str, Any] = {"source": source.fingerprint, "rounding": wish.rounding}
    if wish.dtype is not None:
        settings["dtype"] = str(wish.dtype)
    if wish.mixture is not None:
        settings["mixture"] = {**wish.mixture.settings, "asked": formats}
        formats = _mixed(out, source, matrices, formats, settings, wish)
    settings["formats"] = formats
    by_name = {names.get(t.name): t for t in reversed(tensors)}
    items = [_item(t, formats[t.name], matrices[names[t.name]] if formats[t.name] != NATIVE else None, wish, by_name)
             for t in tensors if t.name in formats]

    def check() -> None:
        changed = changed_file(source.states)
        if changed is not None:
            raise CheckpointError(f"{changed} was changed while it was being quantized; quantize into a "
                                  "new folder when nobody writes to it")

    def prepare_all(folder: Path) -> None:
        source.prepare(folder)
        if wish.dtype is not None:
            write_dtype(folder / "config.json", wish.dtype)

    return write_quantized(out, items, settings, prepare_all, shard_nbytes=shard_nbytes, progress=progress, check=check)


def _mixed(
    out: Path, source: QuantizeSource, matrices: Mapping[str, Matrix], formats: dict[str, str],
    settings: Mapping[str, Any], wish: Wish,
) -> dict[str, str]:
    """`formats` with one that is chosen for each that is MIXED; an interrupted run has chosen already."""
    begun = begun_settings(out)
    if all(begun.get(key) == value for key, value in settings.items()) and isinstance(begun.get("formats"), dict):
        return dict(begun["formats"])
    names = [name for name, format in formats.items() if format == MIXED]
    if not names:
        return formats
    assert wish.mixture is not None
    return formats | choose_mixture(source, matrices, names, wish.mixture, wish.rounding)


def choose_formats(
    tensors: Sequence[SourceTensor], names: Mapping[str, str], matrices: Mapping[str, Matrix], wish: Wish
) -> dict[str, str]:
    """The format of each tensor by its name in the source; `names` gives the model's first name for each.

    A second copy of a tied weight is left out. CheckpointError names the first pattern that matches no matrix.
    """
    asked = {"linear", "experts", *(("head", "tied") if wish.head else ()),
             *(("embedding", "tied") if wish.embeddings else ())}
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
        elif wish.rounding == "symmetric" and format != MIXED:
            format = symmetric_name(format)
        if format not in (NATIVE, MIXED):
            _refuse_unread(format, matrix.inputs(tensor.shape), tensor.name)
        formats[tensor.name] = format
    _refuse_halves({names[name]: format for name, format in formats.items() if name in names}, matrices)
    if unused:
        known = ", ".join(list(matrices)[:3])
        raise CheckpointError(f"the override pattern {unused[0]!r} matches no weight matrix; names are like {known}")
    return formats


def _refuse_halves(formats: Mapping[str, str], matrices: Mapping[str, Matrix]) -> None:
    """CheckpointError for experts of which one matrix is packed and the other is not, or of which two of one product
    differ."""
    packed: dict[str, dict[str, bool]] = {}
    for name, format in formats.items():
        if name in matrices and matrices[name].role == "experts":
            packed.setdefault(matrices[name].module, {})[name] = format != NATIVE
            other = next((each for each in matrices[name].joined if formats.get(each, format) != format), None)
            if other is not None:
                raise CheckpointError(f"{name} would be {format} and {other}, which is read as one with it, "
                                      f"{formats[other]}: name one format for both")
    for own in packed.values():
        if len(set(own.values())) > 1:
            native = next(name for name, is_packed in own.items() if not is_packed)
            raise CheckpointError(f"{native} would keep its values and the other matrix of those experts would not: "
                                  "name a format for both, or native for both")


def _check(wish: Wish, path: Path) -> None:
    for format in (wish.weights, wish.head_format or NATIVE, *(format for _, format in wish.overrides)):
        if format == KEEP and not is_gguf(path) and quantization_settings(path) is None:
            raise CheckpointError(f"the format {KEEP!r} is for GGUF files and others whose weights are quantized "
                                  f"already; {path} is none: name a format such as w4g64")
        if format == MIXED and wish.mixture is None:
            raise CheckpointError(f"the format {MIXED!r} needs the number of bits and a text: name --bits and --text")
        if format not in (NATIVE, KEEP, MIXED):
            _refuse_unread(format)
            if parse_format(format).codebook in GRIDS:
                raise CheckpointError(f"the format {format!r} is that of GGUF files, and nothing is rounded to it; "
                                      "name w4g32 or w4g64")
    if wish.rounding not in ROUNDINGS:
        raise CheckpointError(f"no rounding {wish.rounding!r}; there are {', '.join(ROUNDINGS)}")


def _refuse_unread(format: str, inputs: int = 0, name: str = "") -> None:
    """CheckpointError for rows that no product reads: of `inputs` values, or, where that is 0, of any number."""
    refusal = product_refusal(inputs, parse_format(format).group_size)
    if refusal:
        of, keep = (f" for {name!r}", f", or --override {name}={NATIVE}") if name else ("", "")
        raise CheckpointError(f"the format {format!r}{of} is one that no kernel reads: {refusal}; name w4g32 or w8g32"
                              f"{keep}")


def _item(
    tensor: SourceTensor, format: str, matrix: Matrix | None, wish: Wish, by_name: Mapping[str | None, SourceTensor]
) -> PendingTensor:
    dtype = wish.dtype if wish.dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
    if matrix is None:
        return PendingTensor(tensor.name, dtype, tensor.shape,
                             lambda: (None, (piece.to(dtype) for piece in tensor.contents())))
    stored = parse_format(format)
    inputs, shape = matrix.inputs(tensor.shape), matrix.shape(tensor.shape)
    outputs = math.prod(shape) // max(1, inputs)
    width = stored.row_nbytes(inputs, dtype.itemsize)
    step = max(1, PIECE_NBYTES // (4 * inputs))

    def packed(scale_dtype: torch.dtype) -> Packed:
        return Packed(format, stored.bits, stored.group_size, scale_dtype, shape, dtype,
                      matrix.transposed)

    def pieces() -> Pieces:
        if tensor.format() == format:
            read = tensor.repacked()
            return packed(tensor.scale_dtype), (read(n, min(n + step, outputs)) for n in range(0, outputs, step))
        rows = open_rows(tensor, matrix)
        alike = [open_rows(by_name[name], matrix) for name in matrix.joined if by_name[name] is not tensor]
        scale_dtype = torch.bfloat16 if stored.codebook else _scale_dtype(tensor.name, (rows, *alike), outputs, step)

        def piece(n: int) -> torch.Tensor:
            values = rows(n, min(n + step, outputs))
            if stored.codebook and not values.isfinite().all():
                raise _not_finite(tensor.name)
            return pack_values(values, stored, wish.rounding, scale_dtype)

        return packed(scale_dtype), map(piece, range(0, outputs, step))

    return PendingTensor(tensor.name, torch.uint8, (outputs, width), pieces)


def _not_finite(name: str) -> CheckpointError:
    return CheckpointError(f"{name!r} holds NaN or infinity and cannot be quantized; keep it with --override "
                           f"{name}={NATIVE}")


def _scale_dtype(name: str, alike: Sequence[ReadRows], outputs: int, step: int) -> torch.dtype:
    """fp16, or bf16 for matrices of one product with values that fp16 cannot hold."""
    most = 0.0
    for n, rows in itertools.product(range(0, outputs, step), alike):
        piece = rows(n, min(n + step, outputs))
        if not piece.isfinite().all():
            raise _not_finite(name)
        most = max(most, float(piece.abs().max()) if piece.numel() else 0.0)
    return fitting_scale_dtype(most)
