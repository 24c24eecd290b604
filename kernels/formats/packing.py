"""The one layout of quantized values: packed codes, and rows that hold codes, scales and lows together.

Codes of 4 bits lie two to a byte, low nibble first; codes of 8 bits are bytes. A quantized matrix [N, K] with groups of
G along K is one uint8 matrix `rows` [N, R]. With g = ceil(K / G) each row holds

    g * G * bits / 8 bytes of codes     the last group's missing codes are 0
    2 * g bytes of scales               fp16 or bf16
    2 * g bytes of lows                 the same dtype; none in symmetric rows
    zeros up to a multiple of 16 bytes  (of 4 bytes in a cache, whose rows are short)

so rows [n0, n1) are one contiguous slice of a file and stream like those of any weight. The value of code q is
q * scale + low, low being -2^(bits - 1) * scale in symmetric rows, whose middle code is 0. In fp32 these products are
exact, so every implementation gives the same bits.

Rows with a codebook (`codebooks`) have values codebook[q] * scale, rounded once to fp32. Symmetric ones have scales of
their dtype; the others have scales of fp32, the upper halves of whose bits lie where scales do, the lower ones in place
of lows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from forebay.kernels.formats.row_sizes import WEIGHT_ALIGN, check_format, codes_nbytes, group_count, row_nbytes
from forebay.kernels.formats.table import weight_name

SCALE_DTYPES = (torch.float16, torch.bfloat16)


class Packing(NamedTuple):
    """The format of the packed rows of a weight [N, K]: bits of a code, K, elements that share scale and low, whether
    the lows follow from the scales, and the codebook that codes index."""

    bits: int
    in_features: int
    group_size: int
    scale_dtype: torch.dtype = torch.float16
    symmetric: bool = False
    codebook: str = ""

    @property
    def row_nbytes(self) -> int:
        """R: bytes of one row."""
        return row_nbytes(self.in_features, self.bits, self.group_size, symmetric=self.symmetric)

    @property
    def format(self) -> str:
        """The weight format of these rows."""
        return weight_name(self.bits, self.group_size, self.symmetric, self.codebook)

    def unpack(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """`unpack_rows` of such rows."""
        return unpack_rows(rows, self.in_features, self.bits, self.group_size, self.scale_dtype, self.symmetric)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., C] below 2^bits, C even, as packed bytes [..., C * bits / 8]."""
    return codes if bits == 8 else codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """The inverse of pack_codes: [..., P] -> uint8 [..., P * 8 / bits]."""
    return packed if bits == 8 else torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def unpack_rows(
    rows: Tensor, k: int, bits: int, group_size: int, scale_dtype: torch.dtype, symmetric: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Views (packed [N, P], scale [N, g], low [N, g], None if symmetric) sharing memory with rows [N, R]; leading
    dimensions at will.

    ValueError where rows are not uint8 with a contiguous last dimension, too narrow, or at an odd address.
    """
    count, codes = group_count(k, group_size), codes_nbytes(k, bits, group_size)
    end = codes + (2 if symmetric else 4) * count
    check_format("unpack_rows", bits, group_size)
    if scale_dtype not in SCALE_DTYPES:
        raise ValueError(f"unpack_rows: scale_dtype must be fp16 or bf16, got {scale_dtype}")
    if rows.dtype != torch.uint8 or rows.dim() == 0 or rows.shape[-1] < end:
        raise ValueError(f"unpack_rows: rows must be uint8 of at least {end} columns, got {rows.dtype} {rows.shape}")
    if (rows.shape[-1] > 1 and rows.stride(-1) != 1) or codes % 2:
        raise ValueError(f"unpack_rows: rows must have contiguous, even columns, got strides {rows.stride()}")
    scale = rows[..., codes : codes + 2 * count].view(scale_dtype)
    return rows[..., :codes], scale, None if symmetric else rows[..., codes + 2 * count : end].view(scale_dtype)


def pack_rows(packed: Tensor, scale: Tensor, low: Tensor | None, align: int = WEIGHT_ALIGN) -> Tensor:
    """rows [N, R] from what `quantize` gives along the last dimension: packed [N, P], scale and low [N, g], which is
    None for symmetric rows."""
    if scale.dtype not in SCALE_DTYPES:
        raise ValueError(f"pack_rows: scale must be fp16 or bf16, got {scale.dtype}")
    if low is not None and (scale.shape != low.shape or scale.dtype != low.dtype):
        raise ValueError(f"pack_rows: low must be as scale, {scale.dtype} {scale.shape}, got {low.dtype} {low.shape}")
    if packed.dtype != torch.uint8 or packed.shape[:-1] != scale.shape[:-1]:
        raise ValueError(f"pack_rows: packed must be uint8 of scale's rows, got {packed.dtype} {packed.shape}")
    groups = [part for part in (scale, low) if part is not None]
    plain = (part.clone(memory_format=torch.contiguous_format) for part in groups)  # strides of size 1 too
    parts = [packed, *(part.view(torch.uint8) for part in plain)]
    rest = -sum(part.shape[-1] for part in parts) % align
    parts.append(packed.new_zeros(*packed.shape[:-1], rest))
    return torch.cat(parts, -1)
