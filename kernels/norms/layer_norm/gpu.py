"""`forebay::layer_norm` and `forebay::add_layer_norm` in Triton: a row is read once and kept in registers."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.gpu_support.arguments import check_tensor, leading_dimensions
from forebay.kernels.gpu_support.audit_case import AuditCase
from forebay.kernels.gpu_support.cache_tiles import round_to
from forebay.kernels.gpu_support.launches import bound, kernel_call
from forebay.kernels.norms.rms_norm.gpu import check_rows, row_offsets, tile
from forebay.kernels.norms.rms_norm.reference import MAX_COLUMNS


@triton.jit
def layer_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, summed_ptr, rows, columns,
    n1, n2, xs0, xs1, xs2, os0, os1, os2, eps,
    RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out = (y - mean) rsqrt(var + eps) weight + bias in fp32, y = x, or round(x + residual), which goes to summed."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    used = column < columns
    inside = (row < rows)[:, None] & used[None, :]
    dtype = x_ptr.dtype.element_ty
    x_at = row_offsets(row, n1, n2, xs0, xs1, xs2)[:, None] + column[None, :]
    EARLY: tl.constexpr = COLUMNS <= 8192  # loads stand ahead of the sums, which wait for x, while registers hold them
    if WEIGHT and EARLY:
        weight = tl.load(weight_ptr + column, mask=used, other=0.0)
    if BIAS and EARLY:
        bias = tl.load(bias_ptr + column, mask=used, other=0.0)
    x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        dense = row.to(tl.int64)[:, None] * columns + column[None, :]
        x = round_to(x + tl.load(residual_ptr + dense, mask=inside, other=0.0).to(tl.float32), dtype)
        tl.store(summed_ptr + dense, x, mask=inside)
        x = x.to(tl.float32)
    x = tl.where(inside, x - (tl.sum(x, 1) / columns)[:, None], 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / columns + eps)[:, None]
    if WEIGHT:
        if not EARLY:
            weight = tl.load(weight_ptr + column, mask=used, other=0.0)
        y *= weight.to(tl.float32)[None, :]
    if BIAS:
        if not EARLY:
            bias = tl.load(bias_ptr + column, mask=used, other=0.0)
        y += bias.to(tl.float32)[None, :]
    out_at = row_offsets(row, n1, n2, os0, os1, os2)[:, None] + column[None, :]
    tl.store(out_ptr + out_at, round_to(y, dtype), mask=inside)


def bind_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out: Tensor, residual: Tensor | None = None,
    summed: Tensor | None = None,
) -> Callable[[], None]:  # fmt: skip
    """layer_norm as a call without arguments, on the tensors' contents at each call; the checks are made here."""
    op = "layer_norm" if residual is None else "add_layer_norm"
    check_rows(op, x, out, residual, summed)
    columns = x.shape[-1]
    for tensor, name in ((weight, "weight"), (bias, "bias")):
        if tensor is not None:
            check_tensor(op, name, tensor, device=x.device, dtype=x.dtype, shape=(columns,))
    if x.numel() == 0:
        return lambda: None
    rows = x.numel() // columns
    sizes, x_strides, out_strides = leading_dimensions(op, x, out)
    high, wide, warps = tile(columns)
    return bound(kernel_call(
        layer_norm_kernel, (triton.cdiv(rows, high),),
        x, residual, weight, bias, out, summed, rows, columns, sizes[1], sizes[2], *x_strides, *out_strides, eps,
        RESIDUAL=residual is not None, WEIGHT=weight is not None, BIAS=bias is not None,
        ROWS=high, COLUMNS=wide, num_warps=warps,
    ))  # fmt: skip


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out: Tensor, residual: Tensor | None = None,
    summed: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill out [..., H] from x [..., H], weight and bias [H]; with a residual, of x + residual, which fills summed.

    One dtype of fp32, bf16 and fp16; x and out may be strided over their rows, out may be x itself, and summed x or
    residual. H is at most 16384. ValueError names the argument that is wrong, before the launch.
    """
    bind_layer_norm(x, weight, bias, eps, out, residual, summed)()


def audit_cases() -> list[AuditCase]:
    """GPT-2 XL, OPT-30B and the longest row, 512 rows each, with weight and bias."""
    cases = []
    for columns, residual, dtype in ((1600, False, "fp16"), (7168, False, "fp16"), (7168, True, "fp16"),
                                     (MAX_COLUMNS, True, "fp32")):  # fmt: skip
        high, wide, warps = tile(columns)
        pointers = ("x_ptr", "residual_ptr", "weight_ptr", "bias_ptr", "out_ptr", "summed_ptr")
        numbers = ("rows", "columns", "n1", "n2", "xs0", "xs1", "xs2", "os0", "os1", "os2")
        unused = () if residual else ("residual_ptr", "summed_ptr")
        nbytes = (4 if residual else 2) * 512 * columns * (4 if dtype == "fp32" else 2)
        cases.append(
            AuditCase(
                name=f"{'add_' if residual else ''}layer_norm/{columns}/{dtype}",
                fn=layer_norm_kernel,
                signature={p: "constexpr" if p in unused else f"*{dtype}" for p in pointers}
                | {n: "i32" for n in numbers}
                | {"eps": "fp32"},
                constants={"RESIDUAL": residual, "WEIGHT": True, "BIAS": True, "ROWS": high, "COLUMNS": wide}
                | {p: None for p in unused},
                num_warps=warps,
                divisible=(*(p for p in pointers if p not in unused), "columns", "xs0", "xs1", "xs2", "os0", "os1",
                           "os2"),
                main_operands=2 if residual else 1,
                bytes_moved=nbytes,
                minimum_bytes=nbytes,
                aim=0.75,
                turn_nbytes=nbytes * high // 512,
            )
        )  # fmt: skip
    return cases
