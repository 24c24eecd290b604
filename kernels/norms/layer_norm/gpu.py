"""`forebay::layer_norm` in Triton: a row is read once and kept in registers."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.gpu_support.arguments import check_tensor, leading_dimensions
from forebay.kernels.gpu_support.cache_tiles import round_to
from forebay.kernels.gpu_support.launches import bound, kernel_call
from forebay.kernels.norms.rms_norm.gpu import check_rows, row_offsets, tile


@triton.jit
def layer_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, columns, n1, n2, xs0, xs1, xs2, os0, os1, os2, eps,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out = (x - mean) rsqrt(var + eps) weight + bias, in fp32."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    used = column < columns
    inside = (row < rows)[:, None] & used[None, :]
    dtype = x_ptr.dtype.element_ty
    x_at = row_offsets(row, n1, n2, xs0, xs1, xs2)[:, None] + column[None, :]
    EARLY: tl.constexpr = COLUMNS <= 8192  # loads stand ahead of the sums, which wait for x, while registers hold them
    if WEIGHT:
        weight = tl.load(weight_ptr + column, mask=used, other=0.0)
    if BIAS and EARLY:
        bias = tl.load(bias_ptr + column, mask=used, other=0.0)
    x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(inside, x - (tl.sum(x, 1) / columns)[:, None], 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / columns + eps)[:, None]
    if WEIGHT:
        y *= weight.to(tl.float32)[None, :]
    if BIAS:
        if not EARLY:
            bias = tl.load(bias_ptr + column, mask=used, other=0.0)
        y += bias.to(tl.float32)[None, :]
    out_at = row_offsets(row, n1, n2, os0, os1, os2)[:, None] + column[None, :]
    tl.store(out_ptr + out_at, round_to(y, dtype), mask=inside)


def bind_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out: Tensor
) -> Callable[[], None]:
    """layer_norm as a call without arguments, on the tensors' contents at each call; the checks are made here."""
    check_rows("layer_norm", x, out)
    columns = x.shape[-1]
    for tensor, name in ((weight, "weight"), (bias, "bias")):
        if tensor is not None:
            check_tensor("layer_norm", name, tensor, device=x.device, dtype=x.dtype, shape=(columns,))
    if x.numel() == 0:
        return lambda: None
    rows = x.numel() // columns
    sizes, x_strides, out_strides = leading_dimensions("layer_norm", x, out)
    high, wide, warps = tile(columns)
    return bound(kernel_call(
        layer_norm_kernel, (triton.cdiv(rows, high),),
        x, weight, bias, out, rows, columns, sizes[1], sizes[2], *x_strides, *out_strides, eps,
        WEIGHT=weight is not None, BIAS=bias is not None, ROWS=high, COLUMNS=wide, num_warps=warps,
    ))  # fmt: skip
