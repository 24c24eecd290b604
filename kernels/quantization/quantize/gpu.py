"""`forebay::quantize` and `forebay::dequantize` in Triton: the formulas of `reference.py`, bit for bit.

A tile is some groups side by side: along the last dimension each row of the tile is one group, and along any other
dimension its rows are neighbours in memory, one place of the group after the other. Every byte moves once."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.formats.codebooks import CODEBOOKS
from forebay.kernels.formats.row_sizes import codes_nbytes
from forebay.kernels.gpu_support.arguments import check_tensor, fail
from forebay.kernels.gpu_support.cache_tiles import INTERPRETED, round_to
from forebay.kernels.gpu_support.codebooks import coded_scale, number_of

SCALE_DTYPES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TILE_ELEMENTS = 4096  # 16 bytes of 4-bit codes for each of 128 threads
MAX_GROUP = 1024
# Numbers from here on, 1.5 * 2^23, to 2^24 are whole, and the low bits of their patterns are those of their integers.
CODE_BASE = tl.constexpr(12582912.0)
WARPS = 4
FIRST_PLACES = 64  # inner places of a program that quantizes along another dimension


@triton.jit
def fused(a, b, c):
    """a * b + c in fp32, rounded once."""
    if not INTERPRETED:
        return tl.fma(a, b, c)
    # Its own rounds twice; in fp64 the product is exact.
    return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)


@triton.jit
def range_of(lowest, highest, nought, dtype: tl.constexpr, BITS: tl.constexpr):
    """(scale, low) of dtype for groups between lowest and highest, rounded outward; NaN the scale that cannot be held.

    nought is 0, or NaN where a group holds NaN, which minimum and maximum pass over.
    """
    top: tl.constexpr = (1 << BITS) - 1
    lowest += 0.0
    low = round_to(lowest, dtype)
    # A low above the minimum has its sign, zero too: the number below is one bit pattern away.
    bits = low.to(tl.int16, bitcast=True)
    below = (bits + tl.where(bits < 0, 1, -1)).to(tl.int16).to(dtype, bitcast=True)
    low = tl.where(low.to(tl.float32) > lowest, below, low)
    span = highest - low.to(tl.float32)
    # scale is the least number with scale * top >= span, whichever way the quotient is rounded.
    scale = round_to(span * (1.0 / top), dtype)
    above = (scale.to(tl.int16, bitcast=True) + 1).to(tl.int16).to(dtype, bitcast=True)
    scale = tl.where(scale.to(tl.float32) * top < span, above, scale)
    step = scale.to(tl.float32)
    held = step * top + nought < float("inf")  # an infinite x makes an infinite span
    return tl.where(held, step, float("nan")).to(dtype), low


@triton.jit
def group_range(x, valid, dtype: tl.constexpr, BITS: tl.constexpr):
    """(scale, low) of dtype of the valid values in each row of fp32 x, rounded outward; scale NaN if not finite.

    valid is None where all are; values that are not must be finite.
    """
    upper = x
    lower = x
    if valid is not None:
        upper = tl.where(valid, x, float("-inf"))
        lower = tl.where(valid, x, float("inf"))
    return range_of(tl.min(lower, 1), tl.max(upper, 1), tl.sum(x * 0.0, 1), dtype, BITS)


@triton.jit
def group_codes(x, valid, scale, low, BITS: tl.constexpr, CLAMP: tl.constexpr):
    """CODE_BASE + code, fp32, of fp32 x [N, G] in ranges [N]; code 0 where not valid, any where scale is not positive.

    CLAMP: values may lie outside the range. Codes are those of (x - low) / scale divided exactly: a scale of 11 bits
    keeps quotients 2^-12 of a unit in the last place off the middle of two numbers, and x (1/scale), of two parts, has
    an error below 2^-17 of it.
    """
    step = scale.to(tl.float32)
    step = tl.where(step > 0.0, step, 1.0)
    above = x - low.to(tl.float32)[:, None]
    if scale.dtype == tl.bfloat16:  # whose reciprocal may not be a normal number: its exponent is taken out
        unit = (0x7F000000 - (step.to(tl.int32, bitcast=True) & 0x7F800000)).to(tl.float32, bitcast=True)
        step *= unit
        above *= unit[:, None]
    inverse = 1.0 / step
    rest = inverse * fused(inverse * -1.0, step, tl.full(step.shape, 1.0, tl.float32))
    ratio = fused(above, tl.broadcast_to(inverse[:, None], x.shape), above * rest[:, None])
    if CLAMP:
        ratio = tl.minimum(tl.maximum(ratio, 0.0), ((1 << BITS) - 1) * 1.0)
    codes = ratio + CODE_BASE  # to the nearest integer, ties to even
    if valid is not None:
        codes = tl.where(valid, codes, CODE_BASE)
    return codes


@triton.jit
def paired(x, FACTOR: tl.constexpr):
    """first + second * FACTOR of every two neighbours along the second dimension."""
    first, second = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return first + second * FACTOR


@triton.jit
def pack_codes(codes, scale, BITS: tl.constexpr, NBYTES: tl.constexpr):
    """Bytes, or words of 4 NBYTES, of CODE_BASE + code [N, G], low codes first; 0 where scale [N] is not positive."""
    units = codes.to(tl.int32, bitcast=True)  # the code is its low bits
    if BITS == 4:
        units = paired(units, 1 << 4)
    if NBYTES == 4:
        units = paired(paired(units, 1 << 8), 1 << 16)
        # what the pattern of CODE_BASE, 0x4B400000, adds up to
        units -= 1061158912 if BITS == 4 else -1958739968
    else:
        units = units.to(tl.uint8)
    return tl.where((scale.to(tl.float32) > 0.0)[:, None], units, 0)


@triton.jit
def place_of(rows, groups, size, inner, GROUP: tl.constexpr, LAST: tl.constexpr, R: tl.constexpr):
    """(outer index, group, inner index, which rows exist) of this program's R groups."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    if LAST:
        return (row // groups).to(tl.int64), row % groups, row * 0, row < rows
    else:
        zero = row * 0
        return (zero + tl.program_id(2)).to(tl.int64), zero + tl.program_id(1), row, row < rows


@triton.jit
def quantize_kernel(
    x_ptr, packed_ptr, scale_ptr, low_ptr, rows, groups, size,
    BITS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, FULL: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Program: R groups along x's last dimension, which has size places; all is contiguous.

    PADDED is GROUP or a power of two above. FULL: GROUP is PADDED and divides size.
    """
    UNIT: tl.constexpr = 4 if BITS == 4 and PADDED == GROUP and GROUP % 8 == 0 else 1
    GROUP_NBYTES: tl.constexpr = GROUP * BITS // 8
    first = tl.program_id(0).to(tl.int64) * R
    row = tl.arange(0, R)
    there = row < rows - first
    at = tl.arange(0, PADDED)
    if FULL:
        valid = None
        x = tl.load(x_ptr + first * GROUP + row[:, None] * GROUP + at[None, :], mask=there[:, None], other=0.0)
    else:
        outer = (first + row) // groups
        place = ((first + row) % groups)[:, None] * GROUP + at[None, :]
        valid = there[:, None] & (at < GROUP)[None, :] & (place < size)
        x = tl.load(x_ptr + outer[:, None] * size + place, mask=valid, other=0.0)
    x = x.to(tl.float32)
    scale, low = group_range(x, valid, scale_ptr.dtype.element_ty, BITS)
    tl.store(scale_ptr + first + row, scale, mask=there)
    tl.store(low_ptr + first + row, low, mask=there)
    units = pack_codes(group_codes(x, valid, scale, low, BITS, False), scale, BITS, UNIT)
    unit = tl.arange(0, PADDED * BITS // 8 // UNIT)
    packed = packed_ptr + first * GROUP_NBYTES
    if UNIT == 4:
        packed = packed.to(tl.pointer_type(tl.int32))
    packed_at = packed + row[:, None] * (GROUP_NBYTES // UNIT) + unit[None, :]
    tl.store(packed_at, units, mask=there[:, None] & (unit < GROUP_NBYTES // UNIT)[None, :])


@triton.jit
def quantize_first_kernel(
    x_ptr, packed_ptr, scale_ptr, low_ptr, groups, size, inner,
    BITS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, FULL: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Program (R inner places, group, outer index) of x [outer, size, inner], grouped along size; all is contiguous.

    PADDED is GROUP or a power of two above. FULL: GROUP is PADDED and divides size. Even and odd places of a group are
    loaded apart and joined: so the two codes of a byte are in the same thread.
    """
    first = tl.program_id(0) * R
    row = tl.arange(0, R)[:, None]
    there = row < inner - first
    at = tl.arange(0, PADDED)[None, :]
    pair = tl.arange(0, PADDED // 2)[None, :]
    used = there & (pair < GROUP // 2)
    outer = tl.program_id(2).to(tl.int64)
    group = tl.program_id(1)
    place = (outer * groups + group) * inner + first
    left = size - group * GROUP
    pair_at = pair.to(tl.int64) * (2 * inner)
    even_at = x_ptr + (outer * size + group * GROUP) * inner + first + row + pair_at
    if FULL:
        valid = None
        x = tl.join(tl.load(even_at, mask=there, other=0.0), tl.load(even_at + inner, mask=there, other=0.0))
    else:
        valid = there & (at < GROUP) & (at < left)
        even = tl.load(even_at, mask=used & (2 * pair < left), other=0.0)
        x = tl.join(even, tl.load(even_at + inner, mask=used & (2 * pair + 1 < left), other=0.0))
    x = tl.reshape(x, (R, PADDED)).to(tl.float32)
    scale, low = group_range(x, valid, scale_ptr.dtype.element_ty, BITS)
    tl.store(scale_ptr + place + tl.arange(0, R), scale, mask=tl.arange(0, R) < inner - first)
    tl.store(low_ptr + place + tl.arange(0, R), low, mask=tl.arange(0, R) < inner - first)
    codes = pack_codes(group_codes(x, valid, scale, low, BITS, False), scale, BITS, 1)
    packed_at = packed_ptr + (outer * groups + group) * (GROUP * BITS // 8) * inner + first + row
    if BITS == 4:
        tl.store(packed_at + pair.to(tl.int64) * inner, codes, mask=used)
    else:
        even, odd = tl.split(tl.reshape(codes, (R, PADDED // 2, 2)))
        tl.store(packed_at + pair_at, even, mask=used)
        tl.store(packed_at + pair_at + inner, odd, mask=used)


@triton.jit
def dequantize_kernel(
    packed_ptr, scale_ptr, low_ptr, out_ptr, rows, groups, size, inner, packed_outer, scale_outer, low_outer, out_outer,
    limit,
    BITS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, LAST: tl.constexpr, TRANSPOSED: tl.constexpr,
    SYMMETRIC: tl.constexpr, CODEBOOK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Program: R groups into out [outer, size, inner], contiguous but for out_outer between outer indices, or with LAST
    and TRANSPOSED into out [size, outer], where out_outer is between places; finite values stay within limit."""
    outer, group, i, there = place_of(rows, groups, size, inner, GROUP, LAST, R)
    NBYTES: tl.constexpr = PADDED * BITS // 8
    GROUP_NBYTES: tl.constexpr = GROUP * BITS // 8
    byte = tl.arange(0, NBYTES)
    column = group[:, None] * GROUP_NBYTES + byte[None, :]
    at = tl.arange(0, PADDED)
    place = group[:, None] * GROUP + at[None, :]
    if LAST:
        packed_at = packed_ptr + outer[:, None] * packed_outer + column
        scale_at, low_at = outer * scale_outer + group, outer * low_outer + group
        if TRANSPOSED:
            out_at = out_ptr + place.to(tl.int64) * out_outer + outer[:, None]
        else:
            out_at = out_ptr + outer[:, None] * out_outer + place
    else:
        packed_at = packed_ptr + outer[:, None] * packed_outer + column.to(tl.int64) * inner + i[:, None]
        within = group.to(tl.int64) * inner + i
        scale_at, low_at = outer * scale_outer + within, outer * low_outer + within
        out_at = out_ptr + outer[:, None] * out_outer + place.to(tl.int64) * inner + i[:, None]
    q = tl.load(packed_at, mask=there[:, None] & (byte < GROUP_NBYTES)[None, :], other=0)
    if BITS == 4:
        q = tl.reshape(tl.join(q & 15, q >> 4), (R, PADDED))
    upper = tl.load(scale_ptr + scale_at, mask=there, other=0.0)
    if CODEBOOK > 0:
        lower = upper if SYMMETRIC else tl.load(low_ptr + low_at, mask=there, other=0.0)
        y = number_of(q.to(tl.int32), CODEBOOK) * coded_scale(upper, lower, SYMMETRIC)[:, None]
    else:
        scale = upper.to(tl.float32)
        low = scale * -(1 << BITS - 1) if SYMMETRIC else tl.load(low_ptr + low_at, mask=there, other=0.0).to(tl.float32)
        y = q.to(tl.float32) * scale[:, None] + low[:, None]
    y = tl.where((y > limit) & (y < float("inf")), limit, y)
    y = tl.where((y < -limit) & (y > float("-inf")), -limit, y)
    used = there[:, None] & (at < GROUP)[None, :] & (place < size)
    tl.store(out_at, round_to(y, out_ptr.dtype.element_ty), mask=used)


def _check_format(op: str, bits: int, group_size: int, dim: int, dims: int) -> None:
    if bits not in (4, 8):
        fail(op, "bits", f"must be 4 or 8, got {bits}")
    if group_size < 2 or group_size % 2 or group_size > MAX_GROUP:
        fail(op, "group_size", f"must be even, from 2 to {MAX_GROUP}, got {group_size}")
    if not -dims <= dim < dims:
        fail(op, "dim", f"must be one of {dims} dimensions, got {dim}")


def first_warps(padded: int) -> int:
    """Warps of a program of quantize_first_kernel: 128 values a thread, eight groups of them side by side."""
    return max(1, FIRST_PLACES * padded // 4096)


def _launch_shape(outer: int, groups: int, inner: int, padded: int) -> tuple[bool, int, int, tuple[int, int, int]]:
    """(along the last dimension, groups of a tile, groups or inner places in all, grid)."""
    last = inner == 1
    tile = max(1, TILE_ELEMENTS // padded)
    rows = outer * groups if last else inner
    return last, tile, rows, (triton.cdiv(rows, tile), 1 if last else groups, 1 if last else outer)


def quantize(
    x: Tensor, bits: int, group_size: int, dim: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(packed uint8, scale, low) of x, of x's shape but along dim, as `kernels/quantize.py` says; no look for NaN.

    ValueError names what is wrong, before the launch.
    """
    _check_format("quantize", bits, group_size, dim, x.dim())
    check_tensor("quantize", "x", x.flatten()[:0], dtype=FLOATS)
    if scale_dtype not in SCALE_DTYPES:
        fail("quantize", "scale_dtype", f"must be one of {SCALE_DTYPES}, got {scale_dtype}")
    dim %= x.dim()
    before, size, after = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
    groups = triton.cdiv(size, group_size)
    packed = x.new_empty((*before, codes_nbytes(size, bits, group_size), *after), dtype=torch.uint8)
    scale = x.new_empty((*before, groups, *after), dtype=scale_dtype)
    low = torch.empty_like(scale)
    if packed.numel() == 0:
        return packed, scale, low
    outer, inner, padded = math.prod(before), math.prod(after), triton.next_power_of_2(group_size)
    x3 = x.reshape(outer, size, inner).contiguous()
    full = group_size == padded and size % padded == 0
    constants = {"BITS": bits, "GROUP": group_size, "PADDED": padded, "FULL": full}
    if inner == 1:
        tile = max(1, TILE_ELEMENTS // padded)
        quantize_kernel[(triton.cdiv(outer * groups, tile),)](
            x3, packed, scale, low, outer * groups, groups, size, R=tile, num_warps=WARPS, **constants
        )
    else:
        quantize_first_kernel[(triton.cdiv(inner, FIRST_PLACES), groups, outer)](
            x3, packed, scale, low, groups, size, inner, R=FIRST_PLACES, num_warps=first_warps(padded), **constants
        )
    return packed, scale, low


def dequantize(
    packed: Tensor, scale: Tensor, low: Tensor | None, bits: int, group_size: int, dim: int, size: int,
    dtype: torch.dtype, codebook: str = "",
) -> Tensor:
    """q * scale + low in fp32, rounded to dtype, with `size` elements along dim; the three may be strided.

    ValueError names what is wrong, before the launch.
    """
    _check_format("dequantize", bits, group_size, dim, packed.dim())
    dim %= packed.dim()
    groups = triton.cdiv(size, group_size)
    before, after = packed.shape[:dim], packed.shape[dim + 1 :]
    check_tensor("dequantize", "packed", packed.flatten()[:0], dtype=torch.uint8)
    if packed.shape[dim] != (want := codes_nbytes(size, bits, group_size)):
        fail("dequantize", "packed", f"must have {want} bytes along dim, got {packed.shape}")
    lows = scale if low is None else low
    for tensor, argument in ((scale, "scale"), (lows, "low")):
        check_tensor("dequantize", argument, tensor.flatten()[:0], device=packed.device, dtype=SCALE_DTYPES)
        if tensor.shape != (*before, groups, *after):
            fail("dequantize", argument, f"must have shape {(*before, groups, *after)}, got {tuple(tensor.shape)}")
    if dtype not in FLOATS:
        fail("dequantize", "dtype", f"must be one of {FLOATS}, got {dtype}")
    out = packed.new_empty((*before, size, *after), dtype=dtype)
    if out.numel() == 0:
        return out
    outer, inner, padded = math.prod(before), math.prod(after), triton.next_power_of_2(group_size)
    parts = [t.reshape(outer, t.shape[dim], inner) for t in (packed, scale, lows)]
    # Any stride over outer will do, but within one outer index the kernel takes memory in order.
    parts = [t if t[0].is_contiguous() else t.contiguous() for t in parts]
    last, tile, rows, grid = _launch_shape(outer, groups, inner, padded)
    dequantize_kernel[grid](
        *parts, out, rows, groups, size, inner, *(t.stride(0) for t in parts), size * inner, torch.finfo(dtype).max,
        BITS=bits, GROUP=group_size, PADDED=padded, LAST=last, TRANSPOSED=False, SYMMETRIC=low is None,
        CODEBOOK=CODEBOOKS.index(codebook), R=tile, num_warps=WARPS,
    )  # fmt: skip
    return out
