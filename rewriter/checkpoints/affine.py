"""Safetensors checkpoints of HQQ and torchao: whole codes with a scale and a zero point in groups along the inputs.

    hqq         W_q uint8 [G / p, g], of a matrix's G groups of g values: p = 8 / nbits fields of each byte, the highest
                first, hold a p-th of all groups each; scale, zero [G, 1]; a value is (q - zero) scale; axis 1
    torchao     _weight_qdata, _weight_scale, _weight_zero_point; the header's metadata has type and block_size
      Int4Tensor            int8 [N, K / 2], the first in the low nibble; scale, zero [g, N]; q scale + zero, -8 <= q
      Int8Tensor            int8 [N, K]; scale [N, g]; zero_point the same, or none; (q - zero) scale
      IntxUnpackedToInt8Tensor      the same, of the bits that target_dtype has
      Float8Tensor          e4m3 [N, K]; scale for rows, blocks or all: `coded.py`

Codes are kept. Scales and lows are rounded to fp16, or to bf16 where fp16 does not hold them. Activations keep the
model's dtype, also where torchao rounds them.

Layouts: hqq's BitPack and HQQLinear.state_dict, torchao's prototype/safetensors, mslk's int4_row_quantize_zp.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from forebay.kernels.formats import packing, row_sizes
from forebay.kernels.formats.table import weight_format, weight_name
from forebay.rewriter.checkpoints.checkpoint import Checkpoint, read_metadata, read_rows, read_tensor
from forebay.rewriter.checkpoints.coded import GROUPS, CodedTensor, fp8_matrix
from forebay.rewriter.checkpoints.records import CheckpointError, TensorRecord, log_once
from forebay.rewriter.checkpoints.rounding import closest_scale_dtype
from forebay.rewriter.checkpoints.scheme import HQQ, Scheme
from forebay.rewriter.checkpoints.source_tensor import ReadRows

NARROW = ("int1", "int2", "int3", "int4")  # dtypes of torchao whose codes fit 4 bits
FoundMatrices = tuple[list[CodedTensor], set[str]]  # matrices, and the names of what they consist of


@dataclass(frozen=True)
class AffineTensor(CodedTensor):
    """A matrix of codes; its scales and lows, fp32 [N, g] or scales [N], are held, and codes are read a few rows at a
    time."""

    scales: torch.Tensor
    lows: torch.Tensor | None

    @property
    def scale_dtype(self) -> torch.dtype:
        return closest_scale_dtype(self.scales, self.lows)

    def repacked(self, scale_dtype: torch.dtype | None = None) -> ReadRows:
        return lambda lower, upper: packing.pack_rows(*self._row_parts(lower, upper, scale_dtype))

    def _row_parts(
        self, lower: int, upper: int, scale_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        dtype = scale_dtype or self.scale_dtype
        codes, scale = self.parts(lower, upper)
        low = None if self.lows is None else self.lows[lower:upper].to(dtype)
        return packing.pack_codes(codes, self.stored.bits), scale.to(dtype), low


class MatrixCodes(NamedTuple):
    """Codes of a matrix [N, K] and how many bits one has; `read` gives those of some rows, uint8."""

    shape: tuple[int, int]
    bits: int
    read: Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class MatrixParts:
    """The parts of a quantized matrix, by name."""

    name: str
    folder: Path
    records: Mapping[str, TensorRecord]

    def wrong(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.folder}: {self.name} {what}")

    def take(self, part: str) -> TensorRecord:
        return self.records[part] if part in self.records else self.wrong(f"lacks {part}")

    def number(self, part: str, default: int) -> int:
        """A part that is one whole number."""
        if part not in self.records:
            return default
        found = read_tensor(self.records[part])
        if found.numel() != 1 or found.is_floating_point():
            self.wrong(f"has {part} of {found.dtype} {list(found.shape)}, where one whole number is read")
        return int(found.item())

    def affine(
        self, dtype: torch.dtype, codes: MatrixCodes, scale: torch.Tensor, low: torch.Tensor | None
    ) -> AffineTensor:
        """The matrix, with a scale and a low for each of its equal groups [N, g]."""
        (n, k), count = codes.shape, scale.shape[1]
        own = k // count if count and k % count == 0 else 0
        group = next((g for g in GROUPS if own and own % g == 0), 0)
        refusal = row_sizes.product_refusal(k, group) if group else f"groups of {own or 'unequal sizes'} are not read"
        if scale.shape[0] != n or refusal:
            self.wrong(f"is [{n}, {k}] with scales {list(scale.shape)}: {refusal or 'they do not fit together'}")
        if not bool(scale.isfinite().all()) or not (low is None or low.isfinite().all()):
            self.wrong("has a scale or a zero point that is no finite number")
        scales, lows = (None if each is None else each.repeat_interleave(own // group, 1) for each in (scale, low))
        assert scales is not None
        stored = weight_format(weight_name(codes.bits, group, low is None))
        return AffineTensor(self.name, dtype, (n, k), stored, lambda lower, upper: (
            codes.read(lower, upper), scales[lower:upper]), scales, lows)


def affine_tensors(checkpoint: Checkpoint, scheme: Scheme, dtype: torch.dtype) -> FoundMatrices:
    """The quantized matrices of a checkpoint. CheckpointError for parts that are missing, do not fit together, or are
    of a kind that is not read."""
    return _all_hqq(checkpoint, scheme.settings, dtype) if scheme.coded == HQQ else _all_torchao(checkpoint, dtype)


def _all_hqq(checkpoint: Checkpoint, settings: Mapping[str, Any], dtype: torch.dtype) -> FoundMatrices:
    found: list[CodedTensor] = []
    taken: set[str] = set()
    for name in checkpoint.tensors:
        module, _, last = name.rpartition(".")
        if last == "W_q":
            parts = {part: record for part in HQQ_PARTS if (record := checkpoint.tensors.get(f"{module}.{part}"))}
            taken |= {record.name for record in parts.values()}
            found.append(_hqq(MatrixParts(f"{module}.weight", checkpoint.folder, parts), settings, dtype))
    return found, taken


HQQ_PARTS = ("W_q", "scale", "zero", "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype",
             "view_as_float", "quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict",
             "stores_quant_config", "channel_wise", "optimize", "round_zero")


def _hqq(parts: MatrixParts, settings: Mapping[str, Any], dtype: torch.dtype) -> AffineTensor:
    bits = parts.number("nbits", settings.get("nbits", 4))
    if parts.number("axis", settings.get("axis", 1)) != 1:
        parts.wrong("has groups along the outputs (axis 0), which rows cannot hold; quantize with axis=1")
    if bits not in (1, 2, 4, 8):
        parts.wrong(f"has codes of {bits} bits, which are not read; quantize to 2, 4 or 8")
    if parts.number("quant_scale", 0) or parts.number("quant_zero", 0):
        parts.wrong("has quantized scales or zero points, which are not read; quantize without them")
    shape = read_tensor(parts.take("shape")).tolist()
    if len(shape) != 2 or min(shape) < 1:
        parts.wrong(f"has shape {shape}, where a matrix is read")
    n, k = shape
    held = parts.take("W_q")
    scale, zero = (read_tensor(parts.take(part)).float() for part in ("scale", "zero"))
    count, fields = scale.numel(), 8 // bits
    if zero.numel() == 1:
        zero = zero.expand(scale.shape)
    own = n * k // max(1, count)
    if (not count or count % n or own * count != n * k or zero.numel() != count or count % fields
            or held.nbytes * fields != n * k):
        parts.wrong(f"is {shape} of {bits} bits, but has {held.nbytes} bytes of codes, {scale.numel()} scales and "
                    f"{zero.numel()} zero points")
    if (said := parts.number("group_size", own)) != own:
        parts.wrong(f"is {shape} with {count} scales, which are not those of groups of {said}")
    each, groups = count // fields, count // n

    def read(lower: int, upper: int) -> torch.Tensor:
        first, last, found = lower * groups, upper * groups, []
        while first < last:
            field, begin = divmod(first, each)
            end = min(each, begin + last - first)
            stored = read_rows(held, begin, end, own)
            found.append(stored >> (8 - bits * (field + 1)) & ((1 << bits) - 1))
            first += end - begin
        return torch.cat(found).view(upper - lower, k)

    scale = scale.view(n, groups)
    return parts.affine(dtype, MatrixCodes((n, k), max(4, bits), read), scale, -zero.reshape(n, groups) * scale)


def _all_torchao(checkpoint: Checkpoint, dtype: torch.dtype) -> FoundMatrices:
    found: list[CodedTensor] = []
    taken: set[str] = set()
    described: dict[str, str] = {}
    for path in dict.fromkeys(record.path for record in checkpoint.tensors.values()):
        described |= read_metadata(path)
    for name in checkpoint.tensors:
        module, _, last = name.rpartition(".")
        if not last.endswith("_qdata"):
            continue
        own = last.removeprefix("_").removesuffix("_qdata")
        prefix = f"{module}._{own}_"
        records = {key.removeprefix(prefix): record for key, record in checkpoint.tensors.items()
                   if key.startswith(prefix)}
        taken |= {record.name for record in records.values()}
        parts = MatrixParts(f"{module}.{own}", checkpoint.folder, records)
        try:
            about = json.loads(described[parts.name])
            kind, data = str(about["_type"]), dict(about["_data"])
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            parts.wrong(f"is not described in the file's metadata: {error!r}; save it again with a newer torchao")
        found.append(_torchao(parts, kind, data, dtype))
    log_once(f"{checkpoint.folder}: torchao may round activations, here they keep the model's dtype")
    return found, taken


def _torchao(parts: MatrixParts, kind: str, data: Mapping[str, Any], dtype: torch.dtype) -> CodedTensor:
    if "act_pre_scale" in parts.records:
        parts.wrong("has a scale of activations (act_pre_scale), which is not read")
    held, scale_record = parts.take("qdata"), parts.take("scale")
    if kind == "Float8Tensor":
        return fp8_matrix(parts.name, held, scale_record, _block(parts, data), dtype, parts.folder)
    if kind not in ("Int4Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor"):
        parts.wrong(f"is a {kind} of torchao, which is not read; quantize to Int4Tensor, Int8Tensor or Float8Tensor")
    if held.dtype not in (torch.int8, torch.uint8) or len(held.shape) != 2:
        parts.wrong(f"has codes of {held.dtype} {list(held.shape)}, where bytes of a matrix are read")
    n, width = held.shape
    scale = read_tensor(scale_record).float()
    zero = read_tensor(parts.records["zero_point"]).float() if "zero_point" in parts.records else None
    if zero is not None and zero.shape != scale.shape:
        parts.wrong(f"has scales {list(scale.shape)} and zero points {list(zero.shape)}")
    if kind == "Int4Tensor":
        if zero is None or scale.dim() != 2:
            parts.wrong("lacks zero points, or scales of two dimensions")
        def nibbles(lower: int, upper: int) -> torch.Tensor:
            return packing.unpack_codes(read_rows(held, lower, upper), 4) ^ 8

        codes = MatrixCodes((n, 2 * width), 4, nibbles)
        return parts.affine(dtype, codes, scale.t(), zero.t() - 8 * scale.t())
    target = data.get("target_dtype")
    bits = 4 if isinstance(target, dict) and target.get("_data") in NARROW else 8
    middle = 1 << (bits - 1)

    def read(lower: int, upper: int) -> torch.Tensor:
        found = read_rows(held, lower, upper).view(torch.int8).short() + middle
        if bool(((found < 0) | (found >= 2 * middle)).any()):
            parts.wrong(f"has codes that {bits} bits do not hold")
        return found.to(torch.uint8)

    rows, columns = _block(parts, data)
    wanted = math.ceil(n / rows), math.ceil(width / columns)
    if scale.numel() != math.prod(wanted) or (columns < width and width % columns):
        parts.wrong(f"is [{n}, {width}] in blocks of {[rows, columns]}, but has scales {list(scale.shape)}")
    scale = scale.reshape(wanted).repeat_interleave(rows, 0)[:n]
    low = None
    if zero is not None and bool(zero.any()):
        low = (-middle - zero.reshape(wanted).repeat_interleave(rows, 0)[:n]) * scale
    return parts.affine(dtype, MatrixCodes((n, width), bits, read), scale, low)


def _block(parts: MatrixParts, data: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    found = data.get("block_size")
    if not isinstance(found, list) or len(found) != 2 or not all(type(each) is int and each > 0 for each in found):
        parts.wrong(f"has block_size {found!r}, where two numbers above 0 are read")
    return found[0], found[1]
