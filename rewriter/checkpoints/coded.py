"""Safetensors checkpoints whose codes are places in a codebook (`kernels.formats.codebooks`), as rows of `packing`.

    fp8             weight e4m3 [N, K]; weight_scale_inv (weight_scale) [], [N, 1], [N, K / G] or one for each block of
                    128 x 128, of floats, or in uint8 s for 2^(s - 127) (mxfp8)
    bitsandbytes    weight uint8: codes of nf4 or fp4, the first in the high nibble; weight.absmax for each 64 or so
                    values, or its codes of 8 bits: weight.nested_quant_map[code] * weight.nested_absmax + nested_offset
    nvfp4           weight_packed (weight) uint8 [N, K / 2], codes of e2m1; weight_scale e4m3 [N, K / 16], over
                    weight_global_scale (compressed-tensors) or times weight_scale_2 (ModelOpt)
    mxfp4           weight_packed (weight) the same; weight_scale uint8 [N, K / 32], s for 2^(s - 127)

Codes and scales are kept bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from forebay.kernels.formats import codebooks, packing, row_sizes
from forebay.kernels.formats.table import Format, weight_format, weight_name
from forebay.kernels.quantization.quantize.reference import dequantize_reference
from forebay.rewriter.checkpoints.checkpoint import read_rows, read_tensor
from forebay.rewriter.checkpoints.mxfp4 import e8m0_scales
from forebay.rewriter.checkpoints.records import CheckpointError, TensorRecord
from forebay.rewriter.checkpoints.source_tensor import ReadRows

PIECE_NBYTES = 4 << 20
GROUPS = (128, 64, 32)  # values that share a scale in rows, where one serves more
ReadParts = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class CodedTensor:
    """A matrix with a codebook, read a few rows at a time: `parts` gives packed codes and scales, as `stored` says."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, int]
    stored: Format
    parts: ReadParts

    def format(self) -> str:
        return self.stored.name

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def nearest(self) -> str:
        return ""

    def contents(self) -> Iterator[torch.Tensor]:
        n, k = self.shape
        step = max(1, PIECE_NBYTES // (4 * max(1, k)))
        rows = self.rows(False)
        return (rows(begin, min(n, begin + step)).to(self.dtype) for begin in range(0, n, step))

    def rows(self, transposed: bool) -> ReadRows:
        if transposed:
            raise CheckpointError(f"{self.name} is a quantized matrix that the model has transposed, which is not read")
        stored = self.stored

        def values(lower: int, upper: int) -> torch.Tensor:
            codes, scale, low = self._row_parts(lower, upper)
            return dequantize_reference(codes, scale, low, stored.bits, stored.group_size, 1, self.shape[1],
                                        codebook=stored.codebook)

        return values

    def repacked(self, scale_dtype: torch.dtype | None = None) -> ReadRows:
        return lambda lower, upper: packing.pack_rows(*self._row_parts(lower, upper))

    def _row_parts(self, lower: int, upper: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        codes, scale = self.parts(lower, upper)
        if not bool(scale.isfinite().all()):
            raise CheckpointError(f"{self.name} has a scale that is no finite number")
        if self.stored.codebook == "e4m3" and bool(((codes & 0x7F) == 0x7F).any()):
            raise CheckpointError(f"{self.name} holds NaN, which is no weight")
        split = codebooks.split_scales(scale)
        return codes, split[0], None if self.stored.symmetric else split[1]


def coded_tensors(
    tensors: Mapping[str, TensorRecord], bitsandbytes: bool, block: tuple[int, int], dtype: torch.dtype, folder: Path
) -> tuple[list[CodedTensor], set[str]]:
    """The matrices of a checkpoint that have a codebook, and the names of what they consist of. CheckpointError for
    parts that are missing or do not fit together.

    Args:
        tensors: All tensors by name.
        bitsandbytes: Whether that wrote them; the dtypes of others' codes and scales say what they are.
        block: Rows and columns that share a scale where scales are a matrix of blocks.
        dtype: What values are in the model.
        folder: The checkpoint's.
    """
    found, parts = [], set[str]()
    for name, record in tensors.items():
        module, _, last = name.rpartition(".")
        own = StoredMatrix(f"{module}.weight", dtype, folder, tensors, {"": record})
        if bitsandbytes:
            if last != "weight" or f"{name}.absmax" not in tensors:
                continue
            made = own.bitsandbytes()
        elif last == "weight" and record.dtype == torch.float8_e4m3fn:
            made = own.fp8(block)
        elif last in ("weight", "weight_packed") and record.dtype == torch.uint8 and not record.opaque:
            made = own.fours()
        else:
            continue
        found.append(made)
        parts |= own.names
    return found, parts


def fp8_matrix(
    name: str, codes: TensorRecord, scale: TensorRecord, block: tuple[int, int], dtype: torch.dtype, folder: Path
) -> CodedTensor:
    """A matrix in fp8 whose parts go by any names; `block` has the rows and columns that share a scale."""
    if codes.dtype != torch.float8_e4m3fn:
        raise CheckpointError(f"{folder}: {name} is {codes.opaque or codes.dtype}, where e4m3 is read")
    own = {f"{name.removesuffix('weight')}weight_scale": scale}
    return StoredMatrix(name, dtype, folder, own, {"": codes}).fp8(block)


@dataclass(frozen=True)
class StoredMatrix:
    """The stored parts of a matrix."""

    name: str
    dtype: torch.dtype
    folder: Path
    tensors: Mapping[str, TensorRecord]
    taken: dict[str, TensorRecord]

    @property
    def names(self) -> set[str]:
        return {record.name for record in self.taken.values()}

    def wrong(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.folder}: {self.name} {what}")

    def take(self, *names: str) -> TensorRecord:
        """The first part of one of these names."""
        for name in names:
            record = self.tensors.get(name)
            if record is not None:
                self.taken[name] = record
                return record
        return self.wrong(f"lacks {names[0].rpartition('.')[2]}")

    def numbers(self, *names: str) -> torch.Tensor:
        """The contents of a part in fp32."""
        record = self.take(*names)
        if record.opaque:
            self.wrong(f"has {record.name} of {record.opaque}, which is not read")
        return read_tensor(record).float()

    def powers(self, *names: str) -> torch.Tensor:
        """The contents of a part of e8m0, or of bytes, as powers of two in fp32."""
        record = self.take(*names)
        if record.opaque not in ("", "F8_E8M0"):
            self.wrong(f"has {record.name} of {record.opaque}, which is not read")
        return e8m0_scales(read_tensor(record), self.name)

    def made(self, format: str, shape: tuple[int, int], parts: ReadParts) -> CodedTensor:
        stored = weight_format(format)
        refusal = row_sizes.product_refusal(shape[1], stored.group_size)
        return self.wrong(f"is {list(shape)}: {refusal}") if refusal else CodedTensor(
            self.name, self.dtype, shape, stored, parts)

    def fp8(self, block: tuple[int, int]) -> CodedTensor:
        record, module = self.taken[""], self.name.removesuffix("weight")
        if len(record.shape) != 2 or 0 in record.shape:
            self.wrong(f"is e4m3 of {list(record.shape)}, where a matrix is read")
        n, k = record.shape
        names = f"{module}weight_scale_inv", f"{module}weight_scale"
        scale = self.powers(*names) if self.take(*names).dtype == torch.uint8 else self.numbers(*names)
        grid = -(-n // block[0]), -(-k // block[1])
        rows, columns = block
        if scale.numel() == 1:
            scale, rows, columns = scale.view(1, 1), n, k
        elif scale.numel() == n and scale.shape[:1] == (n,):
            scale, rows, columns = scale.view(n, 1), 1, k
        elif scale.numel() == math.prod(grid):
            scale = scale.view(grid)
        elif scale.numel() % n == 0 and k * n % scale.numel() == 0 and k * n // scale.numel() % GROUPS[-1] == 0:
            scale, rows, columns = scale.view(n, -1), 1, k * n // scale.numel()
        else:
            self.wrong(f"is [{n}, {k}], but has scales {list(scale.shape)} for blocks of {list(block)}")
        group = next(g for g in GROUPS if columns == k or columns % g == 0)
        groups = row_sizes.group_count(k, group)

        def parts(lower: int, upper: int) -> tuple[torch.Tensor, torch.Tensor]:
            codes = read_rows(record, lower, upper)
            of = torch.arange(groups) * group // columns
            return (torch.nn.functional.pad(codes, (0, groups * group - k)),
                    scale[torch.arange(lower, upper) // rows][:, of])

        return self.made(weight_name(8, group, codebook="e4m3"), (n, k), parts)

    def fours(self) -> CodedTensor:
        """nvfp4 or mxfp4, as the dtype of scales says."""
        module = self.name.removesuffix("weight")
        scales, factor = self.take(f"{module}weight_scale"), f"{module}weight_scale_2"
        if scales.dtype != torch.float8_e4m3fn:
            return self.grouped_fours(self.taken[""], scales, "mxfp4")
        over = self.numbers(factor if factor in self.tensors else f"{module}weight_global_scale")
        if over.numel() != 1:
            self.wrong(f"has a scale of all {list(over.shape)}, where one number is read")
        over = over.view(())
        return self.grouped_fours(self.taken[""], scales, "nvfp4", lambda scale: (
            scale * over if factor in self.taken else scale / over))

    def grouped_fours(
        self, record: TensorRecord, scales: TensorRecord, format: str,
        whole: Callable[[torch.Tensor], torch.Tensor] = lambda scale: scale,
    ) -> CodedTensor:
        """Codes of e2m1; `whole` makes the scales from the e4m3 ones of groups."""
        group = weight_format(format).group_size
        if (record.dtype != torch.uint8 or len(record.shape) != 2 or 2 * record.shape[1] % group
                or scales.opaque not in ("", "F8_E8M0") or scales.dtype.itemsize != 1
                or scales.nbytes != math.prod(record.shape) * 2 // group):
            self.wrong(f"has codes of {record.dtype} {list(record.shape)} and scales {list(scales.shape)}, where uint8 "
                       f"[N, K / 2] and a byte for each {group} values are read")
        n, width = record.shape

        def parts(lower: int, upper: int) -> tuple[torch.Tensor, torch.Tensor]:
            codes, held = read_rows(record, lower, upper), read_rows(scales, lower, upper, 2 * width // group)
            if format == "mxfp4":
                return codes, e8m0_scales(held, self.name)
            return codes, whole(held.view(torch.float8_e4m3fn).float())

        return self.made(format, (n, 2 * width), parts)

    def bitsandbytes(self) -> CodedTensor:
        record, book = self.taken[""], ""
        state: Mapping[str, Any] = {}
        for kind in ("nf4", "fp4"):
            if (key := f"{self.name}.quant_state.bitsandbytes__{kind}") in self.tensors:
                book, state = kind, self._state(self.take(key))
        try:
            (n, k), size = map(int, state["shape"]), int(state["blocksize"])
            nested, offset = int(state.get("nested_blocksize", 0)), float(state.get("nested_offset", 0.0))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            self.wrong(f"lacks what its quant_state says of bitsandbytes: {error!r}")
        group = next((g for g in GROUPS if k > 0 and k % g == 0 and size > 0 and size % g == 0), 0)
        if not group or n < 1 or record.dtype != torch.uint8 or record.nbytes != n * k // 2:
            self.wrong(f"is [{n}, {k}] of {record.nbytes} bytes in blocks of {size}: rows of a multiple of 32 are read")
        table = self.numbers(f"{self.name}.quant_map")
        if not torch.equal(table, codebooks.codebook_values(book)):
            self.wrong(f"has another quant_map than bitsandbytes' {book}")
        most = self.numbers(f"{self.name}.absmax")
        whole = self.tensors[f"{self.name}.absmax"].dtype == torch.uint8  # codes of scales
        if whole != (f"{self.name}.nested_absmax" in self.tensors):
            self.wrong("has codes of scales without nested_absmax" if whole else "has nested_absmax of scales that are "
                       "no codes")
        if whole:
            steps = self.numbers(f"{self.name}.nested_absmax")
            numbers = self.numbers(f"{self.name}.nested_quant_map")
            if nested < 1 or numbers.numel() != 256 or steps.numel() != -(-most.numel() // nested):
                self.wrong("has nested scales that do not fit together")
            most = numbers.view(-1)[most.long().view(-1)] * steps.view(-1).repeat_interleave(nested)[:most.numel()]
            most = most + offset
        if most.numel() != -(-n * k // size):
            self.wrong(f"is [{n}, {k}], but has {most.numel()} scales for blocks of {size}")
        most, groups = most.view(-1), k // group

        def parts(lower: int, upper: int) -> tuple[torch.Tensor, torch.Tensor]:
            count = upper - lower
            codes = read_rows(record, lower, upper, k // 2)
            at = torch.arange(lower * groups, upper * groups) * group // size
            return codes >> 4 | codes << 4, most[at].view(count, groups)

        return self.made(weight_name(4, group, codebook=book), (n, k), parts)

    def _state(self, record: TensorRecord) -> Mapping[str, Any]:
        try:
            found = json.loads(bytes(read_tensor(record).view(-1).tolist()))
        except (ValueError, RecursionError, TypeError) as error:
            self.wrong(f"has a quant_state that cannot be read: {error}")
        return found if isinstance(found, dict) else self.wrong("has a quant_state that is no object")
