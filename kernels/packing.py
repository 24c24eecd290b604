"""The one layout of quantised values: packed codes, and rows that hold codes, scales and lows together.

Codes of 4 bits lie two to a byte, low nibble first; codes of 8 bits are bytes. A quantised matrix [N, K] with groups of
G along K is one uint8 matrix `rows` [N, R]. With g = ceil(K / G) each row holds

    g * G * bits / 8 bytes of codes     the last group's missing codes are 0
    2 * g bytes of scales               fp16 or bf16
    2 * g bytes of lows                 the same dtype
    zeros up to a multiple of 16 bytes  (of 4 bytes in a cache, whose rows are short)

so rows [n0, n1) are one contiguous slice of a file and stream like those of any weight. The value of code q is
q * scale + low. In fp32 that product is exact, so every implementation gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = (4, 8)
SCALE_DTYPES = (torch.float16, torch.bfloat16)
# Bytes that rows are padded to: 16 keep every row of a weight at an address that 128-bit loads take.
WEIGHT_ALIGN = 16
CACHE_ALIGN = 4
# Bits and group size of the weight formats that a Plan names.
WEIGHT_FORMATS = {"w4g32": (4, 32), "w4g64": (4, 64), "w4g128": (4, 128), "w8": (8, 128)}
CACHE_FORMATS = {"kv4": 4, "kv8": 8}
# Bits and group size of checkpointed activations, rows [..., row_nbytes(hidden, bits, group)] with scales in fp16.
ACTIVATION_FORMATS = {"act8": (8, 64)}


def group_count(size: int, group_size: int) -> int:
    """Groups of group_size that size elements fill; the last may be partial."""
    return -(-size // group_size)


def codes_nbytes(size: int, bits: int, group_size: int) -> int:
    """Bytes of the codes of size elements, whole groups."""
    return group_count(size, group_size) * group_size * bits // 8


def row_nbytes(k: int, bits: int, group_size: int, align: int = WEIGHT_ALIGN) -> int:
    """R: bytes of one packed row of k elements."""
    check_format("packing", bits, group_size)
    used = codes_nbytes(k, bits, group_size) + 4 * group_count(k, group_size)
    return -(-used // align) * align


def equal_group_size(size: int, parts: int) -> int:
    """Elements per group where size elements fall into equal parts, rounded up to fours."""
    return 4 * group_count(max(1, size), 4 * max(1, parts))


def cache_group_size(head_dim: int, bits: int) -> int:
    """Elements per group of a quantised cache row: of 8 bits 64 at most, of 4 bits round(head_dim / 32) groups.

    At 4 bits a group of 32 loses 0.7 times what one of 64 does (see `kv_append_q`), for 2 bytes more in 16.
    """
    return equal_group_size(head_dim, group_count(head_dim, 64) if bits == 8 else (head_dim + 15) // 32)


def cache_row_nbytes(head_dim: int, bits: int) -> int:
    """Bytes of one position of one KV head in a quantised cache: kv4 at 64 takes 40, kv8 takes 68."""
    return row_nbytes(head_dim, bits, cache_group_size(head_dim, bits), CACHE_ALIGN)


def check_format(op: str, bits: int, group_size: int) -> None:
    """ValueError, opened by op, unless bits is 4 or 8 and group_size is even and positive."""
    if bits not in BITS:
        raise ValueError(f"{op}: bits must be 4 or 8, got {bits}")
    if group_size < 2 or group_size % 2:
        raise ValueError(f"{op}: group_size must be even and positive, got {group_size}")


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., C] below 2^bits, C even, as packed bytes [..., C * bits / 8]."""
    return codes if bits == 8 else codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """The inverse of pack_codes: [..., P] -> uint8 [..., P * 8 / bits]."""
    return packed if bits == 8 else torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def unpack_rows(
    rows: Tensor, k: int, bits: int, group_size: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Views (packed [N, P], scale [N, g], low [N, g]) sharing memory with rows [N, R]; leading dimensions at will.

    ValueError where rows are not uint8 with a contiguous last dimension, too narrow, or at an odd address.
    """
    count, codes = group_count(k, group_size), codes_nbytes(k, bits, group_size)
    end = codes + 4 * count
    check_format("unpack_rows", bits, group_size)
    if scale_dtype not in SCALE_DTYPES:
        raise ValueError(f"unpack_rows: scale_dtype must be fp16 or bf16, got {scale_dtype}")
    if rows.dtype != torch.uint8 or rows.dim() == 0 or rows.shape[-1] < end:
        raise ValueError(f"unpack_rows: rows must be uint8 of at least {end} columns, got {rows.dtype} {rows.shape}")
    if (rows.shape[-1] > 1 and rows.stride(-1) != 1) or codes % 2:
        raise ValueError(f"unpack_rows: rows must have contiguous, even columns, got strides {rows.stride()}")
    scale, low = (rows[..., begin : begin + 2 * count].view(scale_dtype) for begin in (codes, codes + 2 * count))
    return rows[..., :codes], scale, low


def pack_rows(packed: Tensor, scale: Tensor, low: Tensor, align: int = WEIGHT_ALIGN) -> Tensor:
    """rows [N, R] from what `quantize` gives along the last dimension: packed [N, P], scale and low [N, g]."""
    if scale.shape != low.shape or scale.dtype != low.dtype or scale.dtype not in SCALE_DTYPES:
        raise ValueError(f"pack_rows: low must be as scale, {scale.dtype} {scale.shape}, got {low.dtype} {low.shape}")
    if packed.dtype != torch.uint8 or packed.shape[:-1] != scale.shape[:-1]:
        raise ValueError(f"pack_rows: packed must be uint8 of scale's rows, got {packed.dtype} {packed.shape}")
    plain = (part.clone(memory_format=torch.contiguous_format) for part in (scale, low))  # strides of size 1 too
    parts = [packed, *(part.view(torch.uint8) for part in plain)]
    rest = -sum(part.shape[-1] for part in parts) % align
    parts.append(packed.new_zeros(*packed.shape[:-1], rest))
    return torch.cat(parts, -1)
