"""`forebay::quantize` and `forebay::dequantize` in Triton: the formulas of `kernels/quantize.py`, bit for bit.

A tile is some groups side by side: along the last dimension each row of the tile is one group, and along any other
dimension its rows are neighbours in memory, one place of the group after the other. Every byte moves once.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.gpu.arguments import check_tensor, fail
from forebay.kernels.gpu.audit_case import AuditCase

SCALE_DTYPES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TILE_ELEMENTS = 4096  # 16 bytes of 4-bit codes for each of 128 threads
MAX_GROUP = 1024
WARPS = {"quantize": 8, "dequantize": 4}  # exact divisions by four warps take stack on sm_90 with Triton 3.9


@triton.jit
def next_value(value, UP: tl.constexpr):
    """The adjacent representable number of a finite fp16 or bf16 value, upward or downward."""
    bits = value.to(tl.int16, bitcast=True)
    wide = value.to(tl.float32)
    if UP:
        moved = tl.where(wide >= 0.0, bits + 1, bits - 1)
        moved = tl.where(wide == 0.0, 1, moved)
    else:
        moved = tl.where(wide < 0.0, bits + 1, bits - 1)
        moved = tl.where(wide == 0.0, -32767, moved)
    return moved.to(tl.int16).to(value.dtype, bitcast=True)


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
    x_ptr, packed_ptr, scale_ptr, low_ptr, rows, groups, size, inner, x_outer,
    BITS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, LAST: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Program: R groups of x [outer, size, inner]; results are contiguous. PADDED is GROUP or a power of two above."""
    TOP: tl.constexpr = (1 << BITS) - 1
    outer, group, i, there = place_of(rows, groups, size, inner, GROUP, LAST, R)
    at = tl.arange(0, PADDED)
    place = group[:, None] * GROUP + at[None, :]
    used = there[:, None] & (at < GROUP)[None, :] & (place < size)
    if LAST:
        x_at = x_ptr + outer[:, None] * x_outer + place
    else:
        x_at = x_ptr + outer[:, None] * x_outer + place.to(tl.int64) * inner + i[:, None]
    x = tl.load(x_at, mask=used, other=0.0).to(tl.float32)
    exact = tl.min(tl.where(used, x, float("inf")), 1) + 0.0
    largest = tl.max(tl.where(used, x, float("-inf")), 1)
    whole = tl.sum(tl.where(used & ((x != x) | (tl.abs(x) == float("inf"))), 1, 0), 1) == 0
    dtype: tl.constexpr = scale_ptr.dtype.element_ty
    low = exact.to(dtype)
    low = tl.where(low.to(tl.float32) > exact, next_value(low, False), low)
    base = low.to(tl.float32)
    span = largest - base
    scale = tl.math.div_rn(span, span * 0.0 + TOP).to(dtype)
    scale = tl.where(scale.to(tl.float32) * TOP < span, next_value(scale, True), scale)
    step = scale.to(tl.float32)
    held = whole & (tl.abs(step * TOP) < float("inf")) & (tl.abs(base) < float("inf"))
    step = tl.where(held, step, float("nan"))
    q = tl.math.div_rn(x - base[:, None], tl.where(step > 0.0, step, 1.0)[:, None] + x * 0.0)
    q = (q + 12582912.0) - 12582912.0  # to the nearest integer, ties to even
    q = tl.where(used & (step > 0.0)[:, None], tl.minimum(tl.maximum(q, 0.0), TOP), 0.0).to(tl.uint8)
    scale_at = outer * groups + group if LAST else (outer * groups + group) * inner + i
    tl.store(scale_ptr + scale_at, step.to(dtype), mask=there)
    tl.store(low_ptr + scale_at, tl.where(whole, base, float("nan")).to(dtype), mask=there)
    if BITS == 4:
        even, odd = tl.split(tl.reshape(q, (R, PADDED // 2, 2)))
        q = even | (odd << 4)
    NBYTES: tl.constexpr = PADDED * BITS // 8
    GROUP_NBYTES: tl.constexpr = GROUP * BITS // 8
    byte = tl.arange(0, NBYTES)
    column = group[:, None] * GROUP_NBYTES + byte[None, :]
    if LAST:
        packed_at = packed_ptr + outer[:, None] * (groups * GROUP_NBYTES) + column
    else:
        packed_at = packed_ptr + (outer[:, None] * (groups * GROUP_NBYTES) + column) * inner + i[:, None]
    tl.store(packed_at, q, mask=there[:, None] & (byte < GROUP_NBYTES)[None, :])


@triton.jit
def dequantize_kernel(
    packed_ptr, scale_ptr, low_ptr, out_ptr, rows, groups, size, inner, packed_outer, scale_outer, low_outer, limit,
    BITS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, LAST: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Program: R groups into out [outer, size, inner], contiguous; finite values stay within limit."""
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
        out_at = out_ptr + outer[:, None] * size + place
    else:
        packed_at = packed_ptr + outer[:, None] * packed_outer + column.to(tl.int64) * inner + i[:, None]
        within = group.to(tl.int64) * inner + i
        scale_at, low_at = outer * scale_outer + within, outer * low_outer + within
        out_at = out_ptr + (outer[:, None] * size + place) * inner + i[:, None]
    q = tl.load(packed_at, mask=there[:, None] & (byte < GROUP_NBYTES)[None, :], other=0)
    if BITS == 4:
        q = tl.reshape(tl.join(q & 15, q >> 4), (R, PADDED))
    scale = tl.load(scale_ptr + scale_at, mask=there, other=0.0).to(tl.float32)
    low = tl.load(low_ptr + low_at, mask=there, other=0.0).to(tl.float32)
    y = q.to(tl.float32) * scale[:, None] + low[:, None]
    y = tl.where((y > limit) & (y < float("inf")), limit, y)
    y = tl.where((y < -limit) & (y > float("-inf")), -limit, y)
    used = there[:, None] & (at < GROUP)[None, :] & (place < size)
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=used)


def _check_format(op: str, bits: int, group_size: int, dim: int, dims: int) -> None:
    if bits not in (4, 8):
        fail(op, "bits", f"must be 4 or 8, got {bits}")
    if group_size < 2 or group_size % 2 or group_size > MAX_GROUP:
        fail(op, "group_size", f"must be even, from 2 to {MAX_GROUP}, got {group_size}")
    if not -dims <= dim < dims:
        fail(op, "dim", f"must be one of {dims} dimensions, got {dim}")


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
    packed = x.new_empty((*before, groups * group_size * bits // 8, *after), dtype=torch.uint8)
    scale = x.new_empty((*before, groups, *after), dtype=scale_dtype)
    low = torch.empty_like(scale)
    if packed.numel() == 0:
        return packed, scale, low
    outer, inner, padded = math.prod(before), math.prod(after), triton.next_power_of_2(group_size)
    x3 = x.reshape(outer, size, inner).contiguous()
    last, tile, rows, grid = _launch_shape(outer, groups, inner, padded)
    quantize_kernel[grid](
        x3, packed, scale, low, rows, groups, size, inner, size * inner,
        BITS=bits, GROUP=group_size, PADDED=padded, LAST=last, R=tile, num_warps=WARPS["quantize"],
    )  # fmt: skip
    return packed, scale, low


def dequantize(
    packed: Tensor,
    scale: Tensor,
    low: Tensor,
    bits: int,
    group_size: int,
    dim: int,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """q * scale + low in fp32, rounded to dtype, with `size` elements along dim; the three may be strided.

    ValueError names what is wrong, before the launch.
    """
    _check_format("dequantize", bits, group_size, dim, packed.dim())
    dim %= packed.dim()
    groups = triton.cdiv(size, group_size)
    before, after = packed.shape[:dim], packed.shape[dim + 1 :]
    check_tensor("dequantize", "packed", packed.flatten()[:0], dtype=torch.uint8)
    if packed.shape[dim] != groups * group_size * bits // 8:
        fail("dequantize", "packed", f"must have {groups * group_size * bits // 8} bytes along dim, got {packed.shape}")
    for tensor, argument in ((scale, "scale"), (low, "low")):
        check_tensor("dequantize", argument, tensor.flatten()[:0], device=packed.device, dtype=SCALE_DTYPES)
        if tensor.shape != (*before, groups, *after):
            fail("dequantize", argument, f"must have shape {(*before, groups, *after)}, got {tuple(tensor.shape)}")
    if dtype not in FLOATS:
        fail("dequantize", "dtype", f"must be one of {FLOATS}, got {dtype}")
    out = packed.new_empty((*before, size, *after), dtype=dtype)
    if out.numel() == 0:
        return out
    outer, inner, padded = math.prod(before), math.prod(after), triton.next_power_of_2(group_size)
    parts = [t.reshape(outer, t.shape[dim], inner) for t in (packed, scale, low)]
    # Any stride over outer will do, but within one outer index the kernel takes memory in order.
    parts = [t if t[0].is_contiguous() else t.contiguous() for t in parts]
    last, tile, rows, grid = _launch_shape(outer, groups, inner, padded)
    dequantize_kernel[grid](
        *parts, out, rows, groups, size, inner, *(t.stride(0) for t in parts), torch.finfo(dtype).max,
        BITS=bits, GROUP=group_size, PADDED=padded, LAST=last, R=tile, num_warps=WARPS["dequantize"],
    )  # fmt: skip
    return out


def audit_cases() -> list[AuditCase]:
    """A 4096 x 4096 matrix in bf16, groups of 64 along either dimension, and 32 and 128 along the last."""
    n = 4096
    cases = []
    for bits in (4, 8):
        for group, last in ((64, True), (64, False), (32, True), (128, True)):
            _, tile, _, _ = _launch_shape(n, n // group, 1 if last else n, group)
            constants = {"BITS": bits, "GROUP": group, "PADDED": group, "LAST": last, "R": tile}
            nbytes = 2 * n * n + n * n * bits // 8 + 2 * 2 * n * n // group
            ending = f"w{bits}g{group}/{'last' if last else 'first'}"
            for op, pointers, strides in (
                ("quantize", {"x_ptr": "*bf16", "packed_ptr": "*u8"}, ("x_outer",)),
                ("dequantize", {"packed_ptr": "*u8", "out_ptr": "*bf16"}, ("packed_outer", "scale_outer", "low_outer")),
            ):
                numbers = ("rows", "groups", "size", "inner", *strides)
                signature = pointers | {"scale_ptr": "*fp16", "low_ptr": "*fp16"} | {name: "i32" for name in numbers}
                cases.append(
                    AuditCase(
                        name=f"{op}/{ending}",
                        fn=quantize_kernel if op == "quantize" else dequantize_kernel,
                        signature=signature | ({"limit": "fp32"} if op == "dequantize" else {}),
                        constants=constants,
                        num_warps=WARPS[op],
                        divisible=(*pointers, "scale_ptr", "low_ptr", *numbers),
                        main_operands=1,
                        bytes_moved=nbytes,
                        minimum_bytes=nbytes,
                        in_suite=group == 64,
                    )
                )
    return cases
