"""GGUF's quantized blocks as rows of `packing`: codes, scales and lows, every value being code * scale + low. Where
lows follow from scales, codes are moved up until their middle stands for 0, and rows are symmetric: they hold no lows.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. d and m are a block's factors, in fp16, q its
codes.

    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0    32 values: (q - 8) d, q d + m, (q - 16) d, q d + m, q d with a signed q
    IQ4_NL, MXFP4                   32 values: table[q] d; d of MXFP4 is a power of two, its codes are kept (e2m1)
    Q2_K, Q3_K, Q6_K                256 values, 16 share factors s and n: q s d - n m, (q - 4) s d, (q - 32) s d
    Q4_K, Q5_K, IQ4_XS              256 values, 32 share factors s and n: q s d - n m, the same, table[q] s d
    IQ1, IQ2, IQ3                   256 values by grids: `gguf_grids`

Codes are exact. So are scales and lows of the first two lines, MXFP4's in bf16, the others' in fp16. The products s d
and n m have up to 18 significant bits and are rounded to fp16's 11, by 2^-11 of themselves at most: up to 2^-7 of a
code's step, where a value that was rounded to a code lost up to 2^-1 of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from forebay.kernels.formats import packing
from forebay.kernels.formats.codebooks import largest
from forebay.kernels.formats.table import weight_name
from forebay.rewriter.checkpoints import gguf_grids

Bytes = np.ndarray  # uint8 [blocks, bytes of a block]
# codes uint8 [blocks, values], scales and lows float32 [blocks, groups], or the code that stands for 0 in all groups
BlockParts = tuple[np.ndarray, np.ndarray, np.ndarray | int]
FP16_MOST = float(np.finfo(np.float16).max)
IQ4_TABLE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16)


class BlockKind(NamedTuple):
    """How a block of `values` values in `nbytes` bytes becomes rows: bits of a code and values that share a scale."""

    values: int
    nbytes: int
    bits: int
    group: int
    parts: Callable[[Bytes], BlockParts]
    scale_dtype: torch.dtype = torch.float16
    symmetric: bool = False
    codebook: str = ""

    @property
    def format(self) -> str:
        """The weight format of these rows."""
        return weight_name(self.bits, self.group, self.symmetric, self.codebook)


def repack(rows: np.ndarray, kind: BlockKind) -> torch.Tensor:
    """Rows of blocks, uint8 [N, bytes of a row], as rows of `packing` [N, R]."""
    count = rows.shape[0]
    codes, *parts = _parts(rows, kind)
    scale, *low = (torch.from_numpy(part.reshape(count, -1)).to(kind.scale_dtype) for part in parts)
    packed = packing.pack_codes(torch.from_numpy(codes.reshape(count, -1)), kind.bits)
    return packing.pack_rows(packed, scale, None if kind.symmetric else low[0])


def representable(rows: np.ndarray, kind: BlockKind) -> bool:
    """Return whether scales and lows are finite in the rows' dtype."""
    _, *parts = _parts(rows, kind)
    most = FP16_MOST if kind.scale_dtype == torch.float16 else float(torch.finfo(kind.scale_dtype).max)
    if kind.symmetric:
        # the least value is finite, too
        most /= max(1.0, largest(kind.codebook)) if kind.codebook else 1 << (kind.bits - 1)
    return all(bool(np.all(np.abs(part) <= most)) for part in parts)  # NaN is not


def _parts(rows: np.ndarray, kind: BlockKind) -> list[np.ndarray]:
    """Codes and scales of the rows, and lows unless they are symmetric."""
    with np.errstate(over="ignore", invalid="ignore"):  # factors that are not finite are told by `representable`
        codes, scale, low = kind.parts(rows.reshape(-1, kind.nbytes))
    if not isinstance(low, int):
        return [codes, scale, low]
    return [codes + np.uint8((1 << (kind.bits - 1)) - low), scale]


def _half(blocks: Bytes, at: int) -> np.ndarray:
    """The fp16 number at byte `at` of each block, float32 [blocks, 1]."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Codes [..., 2 n] of bytes [..., n]: all low nibbles, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], -1)


def _fifth_bits(blocks: Bytes, at: int) -> np.ndarray:
    """Bit 4 of the codes of Q5_0 and Q5_1: bit j of the 32-bit word at byte `at` belongs to value j."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4


def _legacy(header: int, offset: int, high: bool = False) -> Callable[[Bytes], BlockParts]:
    """Blocks of 32 with nibbles after `header` bytes: (q - offset) d, or q d + m where offset is 0."""

    def parts(blocks: Bytes) -> BlockParts:
        d = _half(blocks, 0)
        codes = _nibbles(blocks[:, header : header + 16])
        if high:
            codes |= _fifth_bits(blocks, header - 4)
        return codes, d, offset or _half(blocks, 2)

    return parts


def _q8_0(blocks: Bytes) -> BlockParts:
    return blocks[:, 2:] ^ 128, _half(blocks, 0), 128


def _iq4_nl(blocks: Bytes) -> BlockParts:
    return (IQ4_TABLE + 128).astype(np.uint8)[_nibbles(blocks[:, 2:])], _half(blocks, 0), 128


def _mxfp4(blocks: Bytes) -> BlockParts:
    """Codes of e2m1 and the block's power of two, 2^(e - 127)."""
    return _nibbles(blocks[:, 1:]), np.exp2(blocks[:, :1].astype(np.float32) - 127), 8


def _six_bit_factors(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 6-bit factors of scales and of lows of Q4_K and Q5_K, each [blocks, 8], out of 12 bytes."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (rest & 15) | (first >> 6 << 4)], 1)
    lows = np.concatenate([second & 63, (rest >> 4) | (second >> 6 << 4)], 1)
    return scales, lows


def _q4_k(blocks: Bytes) -> BlockParts:
    scales, lows = _six_bit_factors(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 16:144].reshape(-1, 4, 32)).reshape(-1, 256)
    return codes, _half(blocks, 0) * scales, -(_half(blocks, 2) * lows)


def _q5_k(blocks: Bytes) -> BlockParts:
    scales, lows = _six_bit_factors(blocks[:, 4:16])
    codes = _nibbles(blocks[:, 48:176].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    codes |= (blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    return codes.reshape(-1, 256), _half(blocks, 0) * scales, -(_half(blocks, 2) * lows)


def _two_bits(packed: np.ndarray) -> np.ndarray:
    """Codes [blocks, 2, 4, 32] of 64 bytes: each half holds its four runs of 32 values two bits apart."""
    return packed.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3


def _q2_k(blocks: Bytes) -> BlockParts:
    factors = blocks[:, :16]
    codes = _two_bits(blocks[:, 16:80]).reshape(-1, 256)
    return codes, _half(blocks, 80) * (factors & 15), -(_half(blocks, 82) * (factors >> 4))


def _q3_k(blocks: Bytes) -> BlockParts:
    high = blocks[:, :32].reshape(-1, 1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(2, 4, 1) & 1
    codes = _two_bits(blocks[:, 32:96]) | high << 2
    packed = blocks[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], 1)
    top = (packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, 16)
    scale = _half(blocks, 108) * ((low | top << 4).astype(np.int8) - 32).astype(np.float32)
    return codes.reshape(-1, 256), scale, 4


def _q6_k(blocks: Bytes) -> BlockParts:
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    codes = _nibbles(low).reshape(-1, 2, 4, 32) | (high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3) << 4
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return codes.reshape(-1, 256), scale, 32


def _iq4_xs(blocks: Bytes) -> BlockParts:
    high = blocks[:, 2:4].copy().view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], -1).reshape(-1, 8)
    scale = _half(blocks, 0) * ((low | high << 4).astype(np.int16) - 32).astype(np.float32)
    codes = (IQ4_TABLE + 128).astype(np.uint8)[_nibbles(blocks[:, 8:136].reshape(-1, 8, 16))].reshape(-1, 256)
    return codes, scale, 128


BLOCK_KINDS = {
    "Q4_0": BlockKind(32, 18, 4, 32, _legacy(2, 8), symmetric=True),
    "Q4_1": BlockKind(32, 20, 4, 32, _legacy(4, 0)),
    "Q5_0": BlockKind(32, 22, 8, 32, _legacy(6, 16, True), symmetric=True),
    "Q5_1": BlockKind(32, 24, 8, 32, _legacy(8, 0, True)),
    "Q8_0": BlockKind(32, 34, 8, 32, _q8_0, symmetric=True),
    "IQ4_NL": BlockKind(32, 18, 8, 32, _iq4_nl, symmetric=True),
    "IQ4_XS": BlockKind(256, 136, 8, 32, _iq4_xs, symmetric=True),
    "MXFP4": BlockKind(32, 17, 4, 32, _mxfp4, torch.bfloat16, True, "e2m1"),
    "Q2_K": BlockKind(256, 84, 4, 16, _q2_k),
    "Q3_K": BlockKind(256, 110, 4, 16, _q3_k, symmetric=True),
    "Q4_K": BlockKind(256, 144, 4, 32, _q4_k),
    "Q5_K": BlockKind(256, 176, 8, 32, _q5_k),
    "Q6_K": BlockKind(256, 210, 8, 16, _q6_k, symmetric=True),
    "IQ1_S": BlockKind(256, 50, 4, 32, gguf_grids.iq1_s, symmetric=True, codebook="iq1"),
    "IQ1_M": BlockKind(256, 56, 4, 16, gguf_grids.iq1_m, symmetric=True, codebook="iq1"),
    "IQ2_XXS": BlockKind(256, 66, 4, 32, gguf_grids.iq2_xxs, symmetric=True, codebook="iq2"),
    "IQ2_XS": BlockKind(256, 74, 4, 16, gguf_grids.iq2_xs, symmetric=True, codebook="iq2"),
    "IQ2_S": BlockKind(256, 82, 4, 16, gguf_grids.iq2_s, symmetric=True, codebook="iq2"),
    "IQ3_XXS": BlockKind(256, 98, 4, 32, gguf_grids.iq3_xxs, symmetric=True, codebook="iq3"),
    "IQ3_S": BlockKind(256, 110, 4, 32, gguf_grids.iq3_s, symmetric=True, codebook="iq1"),
}
