"""A captured model as if its weights were packed, for plans of models that are not here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from forebay.kernels.formats.row_sizes import product_refusal
from forebay.rewriter.checkpoints.match_weights import row_format
from forebay.rewriter.checkpoints.matrices import Matrix, find_matrices
from forebay.rewriter.checkpoints.records import CheckpointError, Packed, parse_format
from forebay.rewriter.ir.graph import CapturedModel, WeightSpec

if TYPE_CHECKING:
    from torch import nn


def pack_config(captured: CapturedModel, model: nn.Module, format: str) -> CapturedModel:
    """Return the captured model with the weights that `forebay quantize` packs in rows of `format`.

    Args:
        captured: The model's graphs.
        model: The same model on the meta device, whose modules say which weights are matrices.
        format: Such as "w4g64".

    Raises:
        CheckpointError: No kernel reads that format, or such rows of one of the weights.
    """
    matrices = find_matrices(model)
    weights = dict(captured.weights)
    for name, spec in weights.items():
        matrix = matrices.get(spec.table.sources[0] if spec.table else name)
        if matrix is not None and matrix.role in ("linear", "experts"):
            of = [matrix] if spec.table is None else [matrices.get(source) for source in spec.table.sources]
            weights[name] = replace(spec, stored=row_format(_packed(spec, of, format)))
    return replace(captured, weights=weights)


def _packed(spec: WeightSpec, matrices: Sequence[Matrix | None], format: str) -> Packed:
    """Return the format of a weight's packed rows; for a table of experts, of both matrices."""
    stored = parse_format(format)

    def of(shape: tuple[int, ...], matrix: Matrix) -> Packed:
        inputs = matrix.inputs(shape)
        refusal = product_refusal(inputs, stored.group_size)
        if refusal:
            raise CheckpointError(f"{format}: no kernel reads such rows of {spec.name}: {refusal}; name w4g32 or w8g32")
        return Packed(format, stored.bits, stored.group_size, torch.float16, shape, spec.dtype, matrix.transposed)

    if spec.table is None:
        return of(spec.shape, matrices[0])  # type: ignore[arg-type]
    *ups, down = (of((spec.table.count, *part.shape), matrix)
                  for part, matrix in zip(spec.table.parts, matrices, strict=True) if matrix is not None)
    entry = sum(each.rows.row_nbytes * each.out_features // spec.table.count for each in (*ups, down))
    entry += spec.dtype.itemsize * sum(part.shape[0] for part in spec.table.parts if len(part.shape) == 1)
    return replace(ups[0], shape=spec.shape, transposed=False, entry_nbytes=entry, down=down)
