"""Safetensors checkpoints of whole numbers with scales for rows, groups or a matrix.

    int8      bitsandbytes in 8 bits: weight int8 [N, K]; SCB fp32 [N]; a value is w SCB / 127; weight_format 0, which
              is row after row
    bitnet    weight uint8 [N / 4, K]: four of -1, 0 and 1, each plus 1 in 2 bits; bits 2 i of row n are those of output
              n + i N / 4; weight_scale [1], which divides (bitlinear) or multiplies (autobitlinear)
    stored    weight int8 [N, K]; weight_scale [], [N], [N, 1] or [N, g]; weight_zero_point the same, or none; a value
              is (w - zero) scale: compressed-tensors' int-quantized (W8A8), ModelOpt's and Quark's int8

Codes are kept, and scales are rounded to the dtype of scales in rows, by at most 2^-11 of them in fp16. These tools may
round activations to 8 bits as well; here activations keep the model's dtype.

Layouts: bitsandbytes' Linear8bitLt, transformers' BitLinear and AutoBitLinear, compressed_tensors'
NaiveQuantizationCompressor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from forebay.rewriter.checkpoints.affine import AffineTensor, MatrixCodes, MatrixParts
from forebay.rewriter.checkpoints.checkpoint import read_rows, read_tensor
from forebay.rewriter.checkpoints.records import TensorRecord, log_once
from forebay.rewriter.checkpoints.scheme import BITNET, INT8, STORED

# By reader, the dtype of codes, the scale's name, and the names of what else belongs to a matrix.
PARTS = {INT8: (torch.int8, "SCB", ("weight_format",)), BITNET: (torch.uint8, "weight_scale", ()),
         STORED: (torch.int8, "weight_scale", ("weight_zero_point",))}


def integer_tensors(
    tensors: Mapping[str, TensorRecord], method: str, divides: bool, dtype: torch.dtype, folder: Path
) -> tuple[list[AffineTensor], set[str]]:
    """The quantized matrices of a checkpoint, and the names of what they consist of. CheckpointError for parts that are
    missing or do not fit together.

    Args:
        tensors: All tensors by name.
        method: One of PARTS.
        divides: Whether scales of BITNET divide.
        dtype: What values are in the model.
        folder: The checkpoint's.
    """
    found, taken = [], set[str]()
    stored, scale_name, others = PARTS[method]
    for name, record in tensors.items():
        module, _, last = name.rpartition(".")
        scale = tensors.get(f"{module}.{scale_name}")
        if last != "weight" or (record.dtype != stored if method == STORED else (
                scale is None and record.dtype not in (torch.int8, torch.uint8))):
            continue
        records = {part: each for part in ("weight", scale_name, *others) if (each := tensors.get(f"{module}.{part}"))}
        taken |= {each.name for each in records.values()}
        parts = MatrixParts(name, folder, records)
        if scale is None or record.dtype != stored or len(record.shape) != 2:
            parts.wrong(f"is {str(record.dtype)[6:]} {list(record.shape)} {'without' if scale is None else 'with'} a "
                        f"scale, where {method} has {str(stored)[6:]} of two dimensions with one")
        if method == INT8 and parts.number("weight_format", 0):
            parts.wrong("lies in tiles (weight_format), not row after row; save it again with a newer bitsandbytes")
        found.append(_ternary(parts, dtype, divides) if method == BITNET else _bytes(parts, dtype, scale_name))
    if method != STORED:
        log_once(f"{folder}: {method} rounds activations to 8 bits, here they keep the model's dtype")
    return found, taken


def _bytes(parts: MatrixParts, dtype: torch.dtype, scale_name: str) -> AffineTensor:
    """A matrix whose codes are bytes with a sign."""
    record = parts.records["weight"]
    n, k = record.shape
    scale = _numbers(parts, scale_name, n)
    if scale_name == "SCB":
        scale = scale / 127
    zero = _numbers(parts, "weight_zero_point", n) if "weight_zero_point" in parts.records else torch.zeros(1)
    if bool(zero.any()) and zero.shape != scale.shape:
        parts.wrong(f"has scales {list(scale.shape)} and zero points {list(zero.shape)}")

    def read(lower: int, upper: int) -> torch.Tensor:
        return (read_rows(record, lower, upper, dtype=torch.int8).short() + 128).to(torch.uint8)

    return parts.affine(dtype, MatrixCodes((n, k), 8, read), scale, (-128 - zero) * scale if bool(zero.any()) else None)


def _numbers(parts: MatrixParts, name: str, n: int) -> torch.Tensor:
    """Numbers of groups, rows or a matrix, as fp32 [N, g]."""
    found = read_tensor(parts.records[name]).float()
    if not n or (found.numel() != 1 and (found.numel() % n or not found.numel())):
        parts.wrong(f"has {n} rows and {name} {list(found.shape)}")
    return found.view(1, 1).expand(n, 1) if found.numel() == 1 else found.reshape(n, -1)


def _ternary(parts: MatrixParts, dtype: torch.dtype, divides: bool) -> AffineTensor:
    record = parts.records["weight"]
    scale = read_tensor(parts.records["weight_scale"]).float().view(-1)
    if scale.numel() != 1 or not bool((scale.isfinite() & (scale > 0)).all()):
        parts.wrong(f"has {scale.numel()} scales, where one number above 0 is read")
    n, k = 4 * record.shape[0], record.shape[1]

    def read(lower: int, upper: int) -> torch.Tensor:
        return torch.cat([_field(record, i, lower, upper) for i in range(4)])

    each = (1 / scale if divides else scale).view(1, 1).expand(n, 1)
    return parts.affine(dtype, MatrixCodes((n, k), 4, read), each, None)


def _field(record: TensorRecord, field: int, lower: int, upper: int) -> torch.Tensor:
    """Codes around 8 of the outputs [lower, upper) that lie in one field of the stored rows."""
    rows = record.shape[0]
    first = min(max(lower - field * rows, 0), rows)
    return (read_rows(record, first, max(first, min(upper - field * rows, rows))) >> (2 * field) & 3) + 7
