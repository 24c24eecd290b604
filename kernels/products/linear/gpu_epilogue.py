"""The epilogue of a matmul kernel: the sum over splits of K, bias, activation, multiplier and residual."""

from __future__ import annotations

import triton
import triton.language as tl

ACTIVATIONS = ("", "silu", "gelu", "gelu_tanh", "relu")


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """silu, gelu by the error function, gelu by tanh, or relu, which keeps NaN; in fp32."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "relu":
        return tl.where(x < 0.0, 0.0, x)
    else:
        # 0.5 (1 + tanh z) = 1 / (1 + exp(-2 z)), z = sqrt(2 / pi) (x + 0.044715 x^3)
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def finish_tile(
    y, row, column, out_ptr, bias_ptr, multiplier_ptr, residual_ptr, m, n, om, pm, rm,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MULTIPLIER: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Store act(y + bias) * multiplier + residual, added to out if ACCUMULATE; y is fp32 at (row, column)."""
    inside = (row < m) & (column < n)
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        y = activate(y, ACTIVATION)
    wide_row = row.to(tl.int64)
    if HAS_MULTIPLIER:
        y *= tl.load(multiplier_ptr + wide_row * pm + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + wide_row * rm + column, mask=inside, other=0.0).to(tl.float32)
    out_at = out_ptr + wide_row * om + column
    if ACCUMULATE:
        y += tl.load(out_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def finish(
    y, row, column, local_row, local_column, tile, split, counter_ptr, partial_ptr,
    out_ptr, bias_ptr, multiplier_ptr, residual_ptr, m, n, om, pm, rm,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MULTIPLIER: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACCUMULATE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """finish_tile of the sum of y over SPLITS programs: the last to arrive adds up all parts, always in one order.

    counter_ptr [tiles] is 0 before and after a launch; partial_ptr [tiles, SPLITS, BM, BN] is fp32 scratch.
    """
    if SPLITS == 1:
        finish_tile(
            y, row, column, out_ptr, bias_ptr, multiplier_ptr, residual_ptr, m, n, om, pm, rm,
            ACTIVATION, HAS_BIAS, HAS_MULTIPLIER, HAS_RESIDUAL, ACCUMULATE,
        )  # fmt: skip
    else:
        inside = (row < m) & (column < n)
        at = partial_ptr + tile.to(tl.int64) * (SPLITS * BN * BM) + local_row * BN + local_column
        tl.store(at + split * (BN * BM), y, mask=inside)
        tl.debug_barrier()  # every thread's part is written before the one atomic that publishes it
        arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            total = tl.zeros_like(y)
            for part in range(SPLITS):
                total += tl.load(at + part * (BN * BM), mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(counter_ptr + tile, 0)
            finish_tile(
                total, row, column, out_ptr, bias_ptr, multiplier_ptr, residual_ptr, m, n, om, pm, rm,
                ACTIVATION, HAS_BIAS, HAS_MULTIPLIER, HAS_RESIDUAL, ACCUMULATE,
            )  # fmt: skip
