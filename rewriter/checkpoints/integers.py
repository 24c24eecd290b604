"""Safetensors checkpoints of whole numbers that have one scale for each row, or for a matrix, as symmetric rows.

    int8      bitsandbytes in 8 bits: weight int8 [N, K]; SCB fp32 [N]; a value is w SCB / 127; weight_format 0, which
              is row after row
    bitnet    weight uint8 [N / 4, K]: four of -1, 0 and 1, each plus 1 in 2 bits; bits 2 i of row n are those of output
              n + i N / 4; weight_scale [1], which divides (bitlinear) or multiplies (autobitlinear)

Codes are kept, and scales are rounded to the dtype of scales in rows, by at most 2^-11 of them in fp16. Both tools
round activations to 8 bits as well; here activations keep the model's dtype.

Layouts: bitsandbytes' Linear8bitLt, transformers' BitLinear and AutoBitLinear.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from forebay.kernels.formats import row_sizes
from forebay.kernels.formats.table import weight_format, weight_name
from forebay.rewriter.checkpoints.affine import AffineTensor
from forebay.rewriter.checkpoints.checkpoint import read_rows, read_tensor
from forebay.rewriter.checkpoints.coded import GROUPS
from forebay.rewriter.checkpoints.records import CheckpointError, TensorRecord, log_once
from forebay.rewriter.checkpoints.scheme import BITNET, INT8


def integer_tensors(
    tensors: Mapping[str, TensorRecord], method: str, divides: bool, dtype: torch.dtype, folder: Path
) -> tuple[list[AffineTensor], set[str]]:
    """The quantized matrices of a checkpoint, and the names of what they consist of. CheckpointError for parts that are
    missing or do not fit together.

    Args:
        tensors: All tensors by name.
        method: INT8 or BITNET.
        divides: Whether scales of BITNET divide.
        dtype: What values are in the model.
        folder: The checkpoint's.
    """
    found, parts = [], set[str]()
    for name, record in tensors.items():
        module, _, last = name.rpartition(".")
        scale = tensors.get(f"{module}.{'SCB' if method == INT8 else 'weight_scale'}")
        if last != "weight" or (scale is None and record.dtype not in (torch.int8, torch.uint8)):
            continue
        stored = torch.int8 if method == INT8 else torch.uint8
        if scale is None or record.dtype != stored or len(record.shape) != 2:
            raise CheckpointError(f"{folder}: {name} is {str(record.dtype)[6:]} {list(record.shape)} "
                                  f"{'without' if scale is None else 'with'} a scale, where {method} has "
                                  f"{str(stored)[6:]} of two dimensions with one")
        if method == INT8 and (layout := tensors.get(f"{module}.weight_format")) is not None:
            parts.add(layout.name)
            if bool(read_tensor(layout).any()):
                raise CheckpointError(f"{folder}: {name} lies in tiles (weight_format), not row after row; save it "
                                      "again with a newer bitsandbytes")
        parts |= {name, scale.name}
        found.append(_made(name, record, read_tensor(scale).float().view(-1), method, divides, dtype, folder))
    log_once(f"{folder}: {method} rounds activations to 8 bits, here they keep the model's dtype")
    return found, parts


def _made(
    name: str, record: TensorRecord, scale: torch.Tensor, method: str, divides: bool, dtype: torch.dtype, folder: Path
) -> AffineTensor:
    fields, bits = (1, 8) if method == INT8 else (4, 4)
    stored_rows, k = record.shape
    n, wanted = stored_rows * fields, record.shape[0] if method == INT8 else 1
    if scale.numel() != wanted or not bool((scale.isfinite() & (scale > 0 if method == BITNET else scale >= 0)).all()):
        raise CheckpointError(f"{folder}: {name} is [{n}, {k}], but its {scale.numel()} scales are not {wanted} "
                              "numbers above 0")
    scales = scale / 127 if method == INT8 else (1 / scale if divides else scale).expand(n)
    group = next((each for each in GROUPS if k % each == 0), 0)
    refusal = "rows of a multiple of 32 are read" if not group else row_sizes.product_refusal(k, group)
    if refusal:
        raise CheckpointError(f"{folder}: {name} is [{n}, {k}]: {refusal}")

    def parts(lower: int, upper: int) -> tuple[torch.Tensor, torch.Tensor]:
        if method == INT8:
            codes = (read_rows(record, lower, upper, dtype=torch.int8).short() + 128).to(torch.uint8)
        else:
            codes = torch.cat([_ternary(record, i, lower, upper) for i in range(fields)])
        return codes, scales[lower:upper, None].expand(-1, k // group)

    stored = weight_format(weight_name(bits, group, True))
    return AffineTensor(name, dtype, (n, k), stored, parts, scales, None)


def _ternary(record: TensorRecord, field: int, lower: int, upper: int) -> torch.Tensor:
    """Codes around 8 of the outputs [lower, upper) that lie in one field of the stored rows."""
    rows = record.shape[0]
    first = min(max(lower - field * rows, 0), rows)
    return (read_rows(record, first, max(first, min(upper - field * rows, rows))) >> (2 * field) & 3) + 7
