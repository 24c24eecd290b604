"""Experts in MXFP4, as gpt-oss publishes them: values of 4 bits, 32 of which share a power of two.

    NAME_blocks   uint8 [E, N, K / 32, 16]: two codes to a byte, that of the lower input in the low nibble
    NAME_scales   uint8 [E, N, K / 32]: s, where a value is table[code] 2^(s - 127); 255 stands for none

for the parameter NAME [E, K, N] of the model, which has a matrix of each expert transposed. Table: OCP Microscaling
Formats (MX) v1.0, section 5.3.3 (E2M1); scales: 5.4.1 (E8M0). Rows keep codes, and scales in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from forebay.kernels.formats import packing
from forebay.kernels.formats.codebooks import codebook_values
from forebay.rewriter.checkpoints.checkpoint import read_rows
from forebay.rewriter.checkpoints.records import CheckpointError, TensorRecord
from forebay.rewriter.checkpoints.source_tensor import ReadRows

BLOCKS, SCALES = "_blocks", "_scales"
GROUP, NO_SCALE = 32, 255


def mxfp4_tensors(
    tensors: Mapping[str, TensorRecord], dtype: torch.dtype, folder: Path
) -> tuple[list[Mxfp4Tensor], set[str]]:
    """The parameters of a checkpoint that are stored so, and the names of what they consist of. CheckpointError for
    parts that are missing or do not fit together."""
    found, parts = [], set()
    for name, blocks in tensors.items():
        if not name.endswith(BLOCKS):
            continue
        whole = name.removesuffix(BLOCKS)
        scales = tensors.get(whole + SCALES)
        if scales is None:
            raise CheckpointError(f"{folder}: {whole}, quantized by mxfp4, lacks {SCALES[1:]}")
        if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or len(blocks.shape) != 4 or (
                blocks.shape != (*scales.shape, GROUP // 2)):
            raise CheckpointError(f"{folder}: {whole}, quantized by mxfp4, has blocks of {blocks.dtype} "
                                  f"{list(blocks.shape)} and scales of {scales.dtype} {list(scales.shape)}, where "
                                  "uint8 [E, N, K / 32, 16] and [E, N, K / 32] are read")
        parts |= {name, scales.name}
        found.append(Mxfp4Tensor(whole, dtype, blocks, scales))
    return found, parts


@dataclass(frozen=True)
class Mxfp4Tensor:
    """The matrices of a layer's experts, read a few rows at a time."""

    name: str
    dtype: torch.dtype
    blocks: TensorRecord
    scales: TensorRecord

    @property
    def shape(self) -> tuple[int, ...]:
        """[E, K, N], as the model has it."""
        experts, outputs, groups, _ = self.blocks.shape
        return experts, groups * GROUP, outputs

    def format(self) -> str:
        return "mxfp4"

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.bfloat16

    def nearest(self) -> str:
        return ""

    def contents(self) -> Iterator[torch.Tensor]:
        experts, _, outputs = self.shape
        rows = self.rows(True)
        return (rows(n * outputs, (n + 1) * outputs).t().to(self.dtype) for n in range(experts))

    def rows(self, transposed: bool) -> ReadRows:
        if not transposed:
            raise CheckpointError(f"{self.name}, quantized by mxfp4, is a matrix that the model does not have "
                                  "transposed, which is not read")

        def values(lower: int, upper: int) -> torch.Tensor:
            codes, scale = self._read(lower, upper)
            numbers = codebook_values("e2m1")[packing.unpack_codes(codes, 4).int()]
            return (numbers.unflatten(-1, (-1, GROUP)) * scale[..., None]).flatten(-2)

        return values

    def repacked(self, scale_dtype: torch.dtype | None = None) -> ReadRows:
        def packed(lower: int, upper: int) -> torch.Tensor:
            codes, scale = self._read(lower, upper)
            return packing.pack_rows(codes, scale.to(self.scale_dtype), None)

        return packed

    def _read(self, lower: int, upper: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed codes uint8 [n, K / 2] and scales float32 [n, K / 32] of some outputs."""
        codes = read_rows(self.blocks, lower, upper, self.scales.shape[-1] * GROUP // 2)
        exponents = read_rows(self.scales, lower, upper)
        return codes, e8m0_scales(exponents, f"{self.scales.path}: {self.scales.name}")


def e8m0_scales(exponents: torch.Tensor, name: str) -> torch.Tensor:
    """Return 2^(s - 127) of bytes s in fp32; CheckpointError, with the tensor's `name`, for one that is no number."""
    if bool((exponents == NO_SCALE).any()):
        raise CheckpointError(f"{name} has a scale of {NO_SCALE}, which is no number")
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)
