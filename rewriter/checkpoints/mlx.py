"""Safetensors checkpoints of mlx, whose matrices are weight uint32 [N, W] with scales for groups along the inputs.

    affine    codes of 2 to 8 bits, the first in the lowest bits of a row's stream; scales, biases [N, K / G]; a value
              is q scale + bias
    mxfp4     codes of e2m1, the first in the low nibble; scales uint8 [N, K / 32], s for 2^(s - 127)
    nvfp4     the same codes; scales uint8 [N, K / 16], the bits of e4m3
    mxfp8     codes of e4m3; scales as of mxfp4

Codes, scales and biases are kept; those in fp32 are rounded to fp16 or bf16.

Layouts: mlx.core.quantize, mlx_lm's quantize_model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from forebay.rewriter.checkpoints.affine import FoundMatrices, MatrixCodes, MatrixParts
from forebay.rewriter.checkpoints.checkpoint import read_rows, read_tensor
from forebay.rewriter.checkpoints.coded import CodedTensor, StoredMatrix
from forebay.rewriter.checkpoints.records import TensorRecord

DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}  # by mode, group_size and bits


def mlx_tensors(
    tensors: Mapping[str, TensorRecord], settings: Mapping[str, Any], dtype: torch.dtype, folder: Path
) -> FoundMatrices:
    """The quantized matrices of a checkpoint, and the names of what they consist of. CheckpointError for parts that are
    missing or do not fit together.

    Args:
        tensors: All tensors by name.
        settings: Of all matrices, and by their modules' names of single ones.
        dtype: What values are in the model.
        folder: The checkpoint's.
    """
    found: list[CodedTensor] = []
    taken: set[str] = set()
    for name, record in tensors.items():
        module, _, last = name.rpartition(".")
        if last != "weight" or record.dtype != torch.uint32:
            continue
        records = {part: each for part in ("weight", "scales", "biases") if (each := tensors.get(f"{module}.{part}"))}
        taken |= {each.name for each in records.values()}
        own = settings.get(module)
        found.append(_matrix(MatrixParts(name, folder, records), own if isinstance(own, dict) else settings, dtype))
    return found, taken


def _matrix(parts: MatrixParts, settings: Mapping[str, Any], dtype: torch.dtype) -> CodedTensor:
    mode = settings.get("mode") or "affine"
    if not isinstance(mode, str) or mode not in DEFAULTS:
        parts.wrong(f"is in mode {mode!r}; {', '.join(DEFAULTS)} are read")
    group, bits = (default if settings.get(key) is None else settings[key]
                   for key, default in zip(("group_size", "bits"), DEFAULTS[mode], strict=True))
    words, scales = parts.take("weight"), parts.take("scales")
    if type(group) is not int or type(bits) is not int or not 2 <= bits <= 8 or group < 1 or len(words.shape) != 2:
        parts.wrong(f"is {list(words.shape)} of {bits!r} bits in groups of {group!r}, where a matrix of 2 to 8 bits is "
                    "read")
    n, width = words.shape
    k = 32 * width // bits
    if 32 * width % bits or scales.shape != (n, k // group) or k % group:
        parts.wrong(f"is [{n}, {k}] of {bits} bits in groups of {group}, but has scales {list(scales.shape)}")
    held = replace(words, dtype=torch.uint8, shape=(n, 4 * width))
    if mode == "affine":
        biases = parts.take("biases")
        if biases.shape != scales.shape or not all(
                each.dtype.is_floating_point and each.dtype.itemsize > 1 for each in (scales, biases)):
            parts.wrong(f"has scales {list(scales.shape)} and biases {list(biases.shape)}, where floats of one shape "
                        "are read")

        def read(lower: int, upper: int) -> torch.Tensor:
            return stream_codes(read_rows(held, lower, upper), bits)

        codes = MatrixCodes((n, k), 4 if bits <= 4 else 8, read)
        return parts.affine(dtype, codes, *(read_tensor(each).float() for each in (scales, biases)))
    if (group, bits) != DEFAULTS[mode] or scales.dtype != torch.uint8:
        parts.wrong(f"is {mode} of {bits} bits in groups of {group} with scales of {scales.dtype}, which is not read")
    stored = StoredMatrix(parts.name, dtype, parts.folder, {f"{parts.name}_scale": scales}, {"": held})
    if mode == "mxfp8":
        return replace(stored, taken={"": replace(held, dtype=torch.float8_e4m3fn)}).fp8((1, group))
    return stored.grouped_fours(held, scales, mode)


def stream_codes(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 [n, 8 R / bits] of bytes [n, R], the first in the lowest bits of a stream."""
    whole = rows.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return (whole.flatten(1).unflatten(1, (-1, bits)) << torch.arange(bits, dtype=torch.uint8)).sum(
        -1, dtype=torch.uint8)
