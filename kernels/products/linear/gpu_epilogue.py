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
def halves_of(x):
    """The first and the last rows of x [2 R, C], [R, C] each."""
    return tl.split(tl.permute(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), (1, 2, 0)))


@triton.jit
def segment_of(
    tile_n, n, om, out_ptr, bias_ptr, weight_ptr,
    second_n, second_om, second_out_ptr, second_bias_ptr, second_ptr,
    third_n, third_om, third_out_ptr, third_bias_ptr, third_ptr, BN: tl.constexpr,
):  # fmt: skip
    """(column tile, n, om, out, bias, weight) of the one of three weights whose columns a tile of all of them holds."""
    start = tl.cdiv(n, BN)
    last = start + tl.cdiv(second_n, BN)
    second, third = tile_n >= start, tile_n >= last
    tile_n -= tl.where(third, last, tl.where(second, start, 0))
    n = tl.where(third, third_n, tl.where(second, second_n, n))
    om = tl.where(third, third_om, tl.where(second, second_om, om))
    out_ptr = tl.where(third, third_out_ptr, tl.where(second, second_out_ptr, out_ptr))
    bias_ptr = tl.where(third, third_bias_ptr, tl.where(second, second_bias_ptr, bias_ptr))
    weight_ptr = tl.where(third, third_ptr, tl.where(second, second_ptr, weight_ptr))
    return tile_n, n, om, out_ptr, bias_ptr, weight_ptr


@triton.jit
def column_tiles(n, second_n, third_n, BN: tl.constexpr, SEGMENTS: tl.constexpr, GATED: tl.constexpr):
    """Tiles of columns of a launch."""
    tiles = tl.cdiv(n, BN // 2 if GATED else BN)
    if SEGMENTS > 1:
        tiles += tl.cdiv(second_n, BN) + tl.cdiv(third_n, BN)
    return tiles


@triton.jit
def columns_at(tile_n, BN: tl.constexpr, GATED: tl.constexpr):
    """The columns [BN] of a tile: those of a gate and of what it multiplies, both the same, are half a tile each."""
    COLUMNS: tl.constexpr = BN // 2 if GATED else BN
    return tile_n * COLUMNS + tl.arange(0, BN) % COLUMNS


@triton.jit
def rows_at(weight_ptr, second_ptr, BN: tl.constexpr, GATED: tl.constexpr):
    """The weight that a tile reads: a scalar, or of a gate and what it multiplies one for each column [BN, 1].

    GATED is what both addresses are multiples of. Triton 3.9 does not see that of a choice, and loads number by number.
    """
    if GATED:
        weight_ptr = tl.where(tl.arange(0, BN) < BN // 2, weight_ptr, second_ptr)[:, None]
        weight_ptr = tl.multiple_of(weight_ptr, (GATED, GATED))
    return weight_ptr


@triton.jit
def finish_tile(
    y, row, column, out_ptr, bias_ptr, multiplier_ptr, residual_ptr, m, n, om, pm, rm,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MULTIPLIER: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACCUMULATE: tl.constexpr, second_bias_ptr, GATED: tl.constexpr,
):  # fmt: skip
    """Store act(y + bias) * multiplier + residual, added to out if ACCUMULATE; y is fp32 at (row, column).

    GATED: the first rows of y are a gate, rounded to out's dtype once it is activated, and multiply the last rows."""
    if GATED:
        gate, y = halves_of(y)
        column, _ = halves_of(column)
    inside = (row < m) & (column < n)
    if GATED:
        if HAS_BIAS:
            gate += tl.load(bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)
            y += tl.load(second_bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)
        y *= activate(gate, ACTIVATION).to(out_ptr.dtype.element_ty).to(tl.float32)
    else:
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
    ACCUMULATE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, second_bias_ptr=None,
    GATED: tl.constexpr = 0,
):  # fmt: skip
    """finish_tile of the sum of y over SPLITS programs: the last to arrive adds up all parts, always in one order.

    counter_ptr [tiles] is 0 before and after a launch; partial_ptr [tiles, SPLITS, BM, BN] is fp32 scratch.
    """
    if SPLITS == 1:
        finish_tile(
            y, row, column, out_ptr, bias_ptr, multiplier_ptr, residual_ptr, m, n, om, pm, rm,
            ACTIVATION, HAS_BIAS, HAS_MULTIPLIER, HAS_RESIDUAL, ACCUMULATE, second_bias_ptr, GATED,
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
                ACTIVATION, HAS_BIAS, HAS_MULTIPLIER, HAS_RESIDUAL, ACCUMULATE, second_bias_ptr, GATED,
            )  # fmt: skip
