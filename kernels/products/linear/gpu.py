"""`forebay::linear` in Triton, for fp16 and bf16: three implementations of act(x W^T + bias) * multiplier + residual.

    gemv    M = 1 or 2: fused multiply-adds on 128-bit loads of W, no tensor cores
    flat    M up to 16: the weights stand on the wide side of the tensor-core instruction and x on its narrow side, so
            M is padded to 8 or 16; K is split over programs where the tiles of N do not fill the GPU
    large   the same kernel with tiles of 64 or 128 rows of x

Sums are in fp32 and the result is rounded once. Split parts are added in one order, so equal inputs give equal bits.
Weights are [N, K] (form "nk") or [K, N] (form "kn", GPT-2's Conv1D). Which runs is `selection`'s to say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.gpu_support.arguments import check_tensor, fail, stages
from forebay.kernels.gpu_support.launches import KernelCall, kernel_call
from forebay.kernels.operator import Use
from forebay.kernels.products.linear import selection
from forebay.kernels.products.linear.gpu_arguments import Others, bind_split, prepare, sm_count
from forebay.kernels.products.linear.gpu_epilogue import column_tiles, columns_at, finish, rows_at, segment_of
from forebay.kernels.products.linear.reference import PLAIN, After
from forebay.kernels.products.linear.selection import Grid, grid_of

FORMS = ("nk", "kn")
# Triton's interpreter multiplies the bit patterns of bf16 matrices; there alone they are widened first.
WIDEN = tl.constexpr(bool(triton.knobs.runtime.interpret))
GROUP_ROWS = tl.constexpr(8)


@triton.jit
def tile_of(tiles_m, tiles_n):
    """(row tile, column tile) of this program: 8 row tiles side by side read one tile of weights while it is in L2."""
    pid = tl.program_id(0)
    group = pid // (GROUP_ROWS * tiles_n)
    rows = tl.minimum(tiles_m - group * GROUP_ROWS, GROUP_ROWS)
    within = pid % (GROUP_ROWS * tiles_n)
    return group * GROUP_ROWS + within % rows, within // rows


@triton.jit
def linear_vector_kernel(
    x_ptr, weight_ptr, counter_ptr, partial_ptr, out_ptr, bias_ptr, multiplier_ptr, residual_ptr,
    m, n, om, pm, rm, k, xm, ws,
    KN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MULTIPLIER: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    second_ptr=None, second_n=0, second_om=0, second_out_ptr=None, second_bias_ptr=None,
    third_ptr=None, third_n=0, third_om=0, third_out_ptr=None, third_bias_ptr=None,
    SEGMENTS: tl.constexpr = 1, GATED: tl.constexpr = 0,
):  # fmt: skip
    """Program (tile of columns, split of K): BM = M is 1 or 2; sums stay apart per element of K until the end."""
    tile, split = tl.program_id(0), tl.program_id(1)
    tile_n = tile
    if SEGMENTS > 1:
        tile_n, n, om, out_ptr, bias_ptr, weight_ptr = segment_of(
            tile_n, n, om, out_ptr, bias_ptr, weight_ptr, second_n, second_om, second_out_ptr, second_bias_ptr,
            second_ptr, third_n, third_om, third_out_ptr, third_bias_ptr, third_ptr, BN,
        )  # fmt: skip
    column = columns_at(tile_n, BN, GATED)
    rows = rows_at(weight_ptr, second_ptr, BN, GATED)
    at = tl.arange(0, BK)
    steps = tl.cdiv(tl.cdiv(k, BK), SPLITS)
    sum0 = tl.zeros((BN, BK), tl.float32)
    sum1 = tl.zeros((BN, BK), tl.float32)
    for begin in range(split * steps * BK, tl.minimum(k, (split + 1) * steps * BK), BK):
        place = begin + at
        used = place < k
        inside = (column < n)[:, None] & used[None, :]
        if KN:
            weight_at = weight_ptr + place.to(tl.int64)[None, :] * ws + column[:, None]
        else:
            weight_at = rows + column.to(tl.int64)[:, None] * ws + place[None, :]
        w = tl.load(weight_at, mask=inside, other=0.0)
        x0 = tl.load(x_ptr + place, mask=used, other=0.0)
        if BM == 2:  # both rows are on their way before one is waited for
            x1 = tl.load(x_ptr + xm + place, mask=used, other=0.0)
            sum1 += w.to(tl.float32) * x1.to(tl.float32)[None, :]
        sum0 += w.to(tl.float32) * x0.to(tl.float32)[None, :]
    y = tl.join(tl.sum(sum0, 1), tl.sum(sum1, 1)) if BM == 2 else tl.sum(sum0, 1)[:, None]
    row = tl.arange(0, BM)[None, :]
    finish(
        y, row, column[:, None], row, tl.arange(0, BN)[:, None], tile, split, counter_ptr, partial_ptr,
        out_ptr, bias_ptr, multiplier_ptr, residual_ptr, m, n, om, pm, rm,
        ACTIVATION, HAS_BIAS, HAS_MULTIPLIER, HAS_RESIDUAL, ACCUMULATE, BM, BN, SPLITS, second_bias_ptr, GATED,
    )  # fmt: skip


@triton.jit
def linear_matrix_kernel(
    x_ptr, weight_ptr, counter_ptr, partial_ptr, out_ptr, bias_ptr, multiplier_ptr, residual_ptr,
    m, n, om, pm, rm, k, xm, ws,
    KN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MULTIPLIER: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACCUMULATE: tl.constexpr, STAGES: tl.constexpr,
    second_ptr=None, second_n=0, second_om=0, second_out_ptr=None, second_bias_ptr=None,
    third_ptr=None, third_n=0, third_om=0, third_out_ptr=None, third_bias_ptr=None,
    SEGMENTS: tl.constexpr = 1, GATED: tl.constexpr = 0,
):  # fmt: skip
    """Program (tile of rows and columns, split of K): weights first, which gives the tile's transpose, but for KN."""
    tile_m, tile_n = tile_of(tl.cdiv(m, BM), column_tiles(n, second_n, third_n, BN, SEGMENTS, GATED))
    tile, split = tl.program_id(0), tl.program_id(1)
    if SEGMENTS > 1:
        tile_n, n, om, out_ptr, bias_ptr, weight_ptr = segment_of(
            tile_n, n, om, out_ptr, bias_ptr, weight_ptr, second_n, second_om, second_out_ptr, second_bias_ptr,
            second_ptr, third_n, third_om, third_out_ptr, third_bias_ptr, third_ptr, BN,
        )  # fmt: skip
    row = tile_m * BM + tl.arange(0, BM)
    column = columns_at(tile_n, BN, GATED)
    at = tl.arange(0, BK)
    steps = tl.cdiv(tl.cdiv(k, BK), SPLITS)
    first = split * steps * BK
    x_at = x_ptr + row.to(tl.int64)[:, None] * xm + at[None, :]
    if KN:
        weight_at = weight_ptr + (first + at).to(tl.int64)[:, None] * ws + column[None, :]
    else:
        weight_at = rows_at(weight_ptr, second_ptr, BN, GATED) + column.to(tl.int64)[:, None] * ws
        weight_at += (first + at)[None, :]
    sums = tl.zeros((BM, BN) if KN else (BN, BM), tl.float32)
    for begin in tl.range(first, tl.minimum(k, first + steps * BK), BK, num_stages=STAGES):
        used = at < k - begin
        x = tl.load(x_at + begin, mask=(row < m)[:, None] & used[None, :], other=0.0)
        if KN:
            w = tl.load(weight_at, mask=used[:, None] & (column < n)[None, :], other=0.0)
            weight_at += BK * ws
        else:
            w = tl.load(weight_at, mask=(column < n)[:, None] & used[None, :], other=0.0)
            weight_at += BK
        if WIDEN:
            x, w = x.to(tl.float32), w.to(tl.float32)
        sums = tl.dot(x, w, sums) if KN else tl.dot(w, tl.trans(x), sums)
    local_row, local_column = tl.arange(0, BM), tl.arange(0, BN)
    if KN:
        finish(
            sums, row[:, None], column[None, :], local_row[:, None], local_column[None, :], tile, split,
            counter_ptr, partial_ptr, out_ptr, bias_ptr, multiplier_ptr, residual_ptr, m, n, om, pm, rm,
            ACTIVATION, HAS_BIAS, HAS_MULTIPLIER, HAS_RESIDUAL, ACCUMULATE, BM, BN, SPLITS,
        )  # fmt: skip
    else:
        finish(
            sums, row[None, :], column[:, None], local_row[None, :], local_column[:, None], tile, split,
            counter_ptr, partial_ptr, out_ptr, bias_ptr, multiplier_ptr, residual_ptr, m, n, om, pm, rm,
            ACTIVATION, HAS_BIAS, HAS_MULTIPLIER, HAS_RESIDUAL, ACCUMULATE, BM, BN, SPLITS, second_bias_ptr, GATED,
        )  # fmt: skip


def _plan(
    m: int, n: int, k: int, impl: str, multiprocessors: int, widths: tuple[int, ...] = ()
) -> tuple[str, selection.Setting, Grid]:
    name = impl or selection.choose("linear", m, n, k)
    implementation, setting, splits = selection.parse("linear", name, m, n, k, multiprocessors)
    return implementation, setting, grid_of(implementation, setting, splits, m, n, k, selection.AMD, widths=widths)


def workspace_nbytes(m: int, n: int, k: int, impl: str = "", multiprocessors: int = selection.SM_COUNT) -> int:
    """Bytes that linear asks of `workspace` for this shape and implementation; 0 where K is not split."""
    return _plan(m, n, k, impl, multiprocessors)[2].workspace_nbytes


def _bind(
    x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...], after: After, outs: tuple[Tensor, ...],
    impl: str, form: str, accumulate: bool, workspace: Tensor | None,
) -> tuple[Callable[[], None], Tensor]:  # fmt: skip
    weight, bias, out, others = weights[0], biases[0], outs[0] if outs else None, Others(
        weights[1:], biases[1:], outs[1:])
    if form not in FORMS:
        fail("linear", "form", f"must be one of {FORMS}, got {form!r}")
    if weight.dim() != 2:
        fail("linear", "weight", f"must have two dimensions, got shape {tuple(weight.shape)}")
    n, k = weight.shape if form == "nk" else reversed(weight.shape)
    operands = prepare("linear", x, n, k, bias, after, out, accumulate)
    check_tensor("linear", "weight", weight, device=x.device, dtype=x.dtype)
    others, widths = others.checked("linear", operands, weight), others.widths(n)
    m = operands.x.shape[0]
    result = operands.out if out is None else out
    if out is None:
        result = result.view(*x.shape[:-1], n)
    if result.numel() == 0:
        return (lambda: None), result
    implementation, setting, grid = _plan(m, sum(widths), max(1, k), impl, sm_count(x.device), widths)
    vector = implementation == "gemv"
    kernel: Any = linear_vector_kernel if vector else linear_matrix_kernel
    programs = grid.rows * grid.columns, grid.splits
    arguments = (*operands.arguments(), k, operands.x.stride(0), weight.stride(0))
    constants = operands.constants() | {
        "KN": form == "kn", "BN": setting.bn, "BK": setting.bk, "BM": grid.tile_elements // setting.bn,
        "SPLITS": grid.splits, "num_warps": setting.warps,
    } | ({} if vector else {"STAGES": stages(setting.stages)}) | others.constants(weight)  # fmt: skip

    def launch(counters: Tensor, partials: Tensor) -> KernelCall:
        return kernel_call(kernel, programs, operands.x, weight, counters, partials, *arguments, **constants)

    return bind_split("linear", grid, x.device, workspace, launch), result


def bind_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    after: After,
    out: Tensor,
    impl: str = "",
    form: str = "nk",
    *,
    accumulate: bool = False,
) -> Callable[[], None]:
    """linear as a call without arguments, on the tensors' contents at each call; the checks are made here."""
    return _bind(x, (weight,), (bias,), after, (out,), impl, form, accumulate, None)[0]


def bind_joined(use: Use, after: After) -> Callable[[], None]:
    """A launch with several weights [N, K] (`joined`) as a call without arguments."""
    x, weights, biases = use.args
    return _bind(x, weights, biases, after, use.out, use.impl, "nk", False, None)[0]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    after: After = PLAIN,
    out: Tensor | None = None,
    impl: str = "",
    form: str = "nk",
    *,
    accumulate: bool = False,
    workspace: Tensor | None = None,
) -> Tensor:
    """act(x W^T + bias) * multiplier + residual into out [..., N], or a new tensor; added to out if accumulate.

    x [..., K], weight, residual, multiplier and out are of one dtype, fp16 or bf16; bias [N] may be fp32 too. weight
    is [N, K], or [K, N] with form "kn". Only last dimensions must be contiguous: out may be a column slice. impl is a
    name of `selection`; "" asks its default table. ValueError names what is wrong, before the launch.
    """
    run, result = _bind(x, (weight,), (bias,), after, () if out is None else (out,), impl, form, accumulate, workspace)
    run()
    return result
