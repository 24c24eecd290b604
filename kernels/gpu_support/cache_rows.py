"""A quantized cache as kernels see it: strides, alignment and constants of packed rows (`kernels/kv_append_q.py`)."""

from __future__ import annotations

import math

from torch import Tensor

from forebay.kernels.attention.decode_attention.decode_shares import MOST_DIM
from forebay.kernels.cache.kv_append_q import reference as kv_append_q
from forebay.kernels.formats import row_sizes
from forebay.kernels.gpu_support.arguments import check_device, fail
from forebay.kernels.gpu_support.cache_tiles import CacheView, lanes

WIDEST = 16  # bytes of the widest load


def check_rows(op: str, cache: Tensor, name: str, head_dim: int) -> None:
    """Rows of the cache are contiguous, begin at multiples of 4 bytes and are of a head_dim that kernels take."""
    check_device(op, name, cache)
    if not 1 <= head_dim <= MOST_DIM:
        fail(op, name, f"must have rows of a head_dim of 1 .. {MOST_DIM}, got {head_dim}")
    if cache.stride(3) != 1 or math.gcd(cache.data_ptr(), *row_strides(cache)) % row_sizes.CACHE_ALIGN:
        fail(op, name, f"must have contiguous rows at multiples of {row_sizes.CACHE_ALIGN} bytes, got {cache.stride()}")


def row_strides(cache: Tensor) -> tuple[int, ...]:
    """Bytes from one sequence, head and position to the next; 0 along a dimension of one."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(cache.shape[:3], cache.stride()[:3], strict=True))


def unit_of(*strides: int) -> int:
    """The largest number of bytes, at most a load's, that all strides are multiples of."""
    return math.gcd(WIDEST, *strides)


def rotation_power(head_dim: int) -> int:
    """The logarithm to base 2 of the elements of a rotated block."""
    return kv_append_q.rotation_size(head_dim).bit_length() - 1


def packed_view(k_cache: Tensor, v_cache: Tensor, head_dim: int, bits: int, group: int) -> CacheView:
    """K and V that are packed rows uint8 [B, Hkv, L, R] and have been checked."""
    strides = (*row_strides(k_cache), *row_strides(v_cache))
    constants = lanes(head_dim, group) | {"BITS": bits}
    unit, power = unit_of(*strides), rotation_power(head_dim)
    return CacheView((k_cache, v_cache), strides, constants, unit, power)
