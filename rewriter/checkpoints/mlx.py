"""Safetensors checkpoints of mlx, whose matrices are weight uint32 [N, W] with scales for groups along the inputs.

    affine    codes of 2 to 8 bits, the first in the lowest bits of a row's stream; scales, biases [N, K / G]; a value
              is q scale + bias
    mxfp4     codes of e2m1, the first in the low nibble; scales uint8 [N, K / 32], s for 2^(s - 127)
    nvfp4     the same codes; scales uint8 [N, K / 16], the bits of e4m3
    mxfp8     codes of e4m3; scales as of mxfp4

Codes, scales and biases are kept; those in fp32 are rounded to fp16 or bf16.

The experts of a mixture are stacked in tensors of three dimensions, which the module calls switch_mlp.

Layouts: mlx.core.quantize, mlx_lm's quantize_model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from forebay.rewriter.checkpoints.affine import FoundMatrices, MatrixCodes, MatrixParts
from forebay.rewriter.checkpoints.checkpoint import read_rows, read_tensor
from forebay.rewriter.checkpoints.coded import CodedTensor, StoredMatrix
from forebay.rewriter.checkpoints.records import TensorRecord

STACKED = re.compile(r"(?P<mixture>.+)\.switch_mlp\.(?P<matrix>(gate|up|down)_proj)\.(?P<part>weight|scales|biases)")
EXPERT = re.compile(r"(?P<mixture>.+)\.experts\.\d+\.(?P<matrix>\w+)")
MIXTRAL, MIXTRAL_NAMES = "block_sparse_moe", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
MOST_EXPERTS = 4096
DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}  # by mode, group_size and bits


def one_by_one(tensors: Mapping[str, TensorRecord]) -> dict[str, TensorRecord]:
    """The tensors of a checkpoint, those of stacked experts as a matrix for each expert, named as transformers does."""
    found: dict[str, TensorRecord] = {}
    for name, record in tensors.items():
        stacked = STACKED.fullmatch(name)
        if stacked is None or len(record.shape) != 3 or not 0 < record.shape[0] <= MOST_EXPERTS:
            found[name] = record
            continue
        mixture, matrix = stacked["mixture"], stacked["matrix"]
        own = MIXTRAL_NAMES[matrix] if mixture.endswith(MIXTRAL) else matrix
        nbytes = record.nbytes // record.shape[0]
        for i in range(record.shape[0]):
            each = f"{mixture}.experts.{i}.{own}.{stacked['part']}"
            found[each] = replace(record.part(i * nbytes, nbytes, record.dtype, record.shape[1:]), name=each)
    return found


def _settings_of(module: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a module: its own, or those of all experts of its mixture, or those of all matrices."""
    names = [module]
    if expert := EXPERT.fullmatch(module):
        kinds = {own: kind for kind, own in MIXTRAL_NAMES.items()}
        names.append(f"{expert['mixture']}.switch_mlp.{kinds.get(expert['matrix'], expert['matrix'])}")
    return next((own for name in names if isinstance(own := settings.get(name), dict)), settings)


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
        found.append(_matrix(MatrixParts(name, folder, records), _settings_of(module, settings), dtype))
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
