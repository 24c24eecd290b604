"""`forebay::rms_norm` in Triton: a row is read once and kept in registers."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.gpu_support.arguments import check_tensor, fail, leading_dimensions
from forebay.kernels.gpu_support.cache_tiles import round_to
from forebay.kernels.gpu_support.launches import bound, kernel_call
from forebay.kernels.norms.rms_norm.reference import MAX_COLUMNS

# A row of 16384 fp32 values takes 32 registers of each of 512 threads; a longer one would spill.


@triton.jit
def row_offsets(row, n1, n2, s0, s1, s2):
    """Element offsets of rows numbered through three dimensions of sizes (any, n1, n2) and strides (s0, s1, s2)."""
    inner = row // n2
    return (inner // n1).to(tl.int64) * s0 + (inner % n1).to(tl.int64) * s1 + (row % n2).to(tl.int64) * s2


@triton.jit
def rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, rows, columns, n1, n2, xs0, xs1, xs2, os0, os1, os2, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out = round(weight round(x rsqrt(mean(x^2) + eps)))."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    dtype = x_ptr.dtype.element_ty
    x_at = row_offsets(row, n1, n2, xs0, xs1, xs2)[:, None] + column[None, :]
    x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / columns + eps)
    y = round_to(x * scale[:, None], dtype).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    out_at = row_offsets(row, n1, n2, os0, os1, os2)[:, None] + column[None, :]
    tl.store(out_ptr + out_at, round_to(y * weight[None, :], dtype), mask=inside)


def tile(columns: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of one program: 512 elements a warp and at most 16 warps."""
    wide = triton.next_power_of_2(max(columns, 16))
    high = max(1, 1024 // wide)
    return high, wide, min(16, max(1, high * wide // 512))


def check_rows(op: str, x: Tensor, out: Tensor) -> None:
    """The checks that the norms share: shapes and dtypes."""
    check_tensor(op, "x", x)
    if x.dim() == 0:
        fail(op, "x", "must have at least one dimension")
    if x.shape[-1] > MAX_COLUMNS:
        fail(op, "x", f"must have rows of at most {MAX_COLUMNS} elements, got {x.shape[-1]}")
    check_tensor(op, "out", out, device=x.device, dtype=x.dtype, shape=x.shape)


def bind_rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Callable[[], None]:
    """rms_norm as a call without arguments, on the tensors' contents at each call; the checks are made here."""
    check_rows("rms_norm", x, out)
    columns = x.shape[-1]
    check_tensor("rms_norm", "weight", weight, device=x.device, dtype=x.dtype, shape=(columns,))
    if x.numel() == 0:
        return lambda: None
    rows = x.numel() // columns
    sizes, x_strides, out_strides = leading_dimensions("rms_norm", x, out)
    high, wide, warps = tile(columns)
    return bound(kernel_call(
        rms_norm_kernel, (triton.cdiv(rows, high),),
        x, weight, out, rows, columns, sizes[1], sizes[2], *x_strides, *out_strides, eps,
        ROWS=high, COLUMNS=wide, num_warps=warps,
    ))  # fmt: skip
