"""`linear_q` in Triton: packed rows (`packing`) unpacked in registers on their way to the product.

    gemv    M = 1 or 2: fused multiply-adds in fp32
    flat    M up to 16, or "large" in tiles of 64: tensor cores, codes on their wide side; K split where N is short
    raw     M up to 128: tensor cores over codes as they are (`gpu_raw`), for fp8 and fp4, or where a table names it
    aten    W dequantized once, then torch's product (`gpu_dequantized`)

Codes are read as 32-bit words and become weights of x's dtype two at a time (`unpacking`), four (4 bits) or two (8)
elements apart: each interleaved part of K has its own columns of x, and no value moves between threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.formats import row_sizes
from forebay.kernels.formats.packing import SCALE_DTYPES, Packing
from forebay.kernels.gpu_support.arguments import check_tensor, fail, stages
from forebay.kernels.gpu_support.launches import KernelCall, kernel_call
from forebay.kernels.gpu_support.unpacking import spread, weights_of
from forebay.kernels.operator import Use
from forebay.kernels.products.linear import selection
from forebay.kernels.products.linear.choices import GROUP_SIZES, coded
from forebay.kernels.products.linear.gpu import tile_of
from forebay.kernels.products.linear.gpu_arguments import ALONE, Others, bind_split, prepare, sm_count
from forebay.kernels.products.linear.gpu_epilogue import column_tiles, columns_at, finish, rows_at, segment_of
from forebay.kernels.products.linear.reference import PLAIN, After
from forebay.kernels.products.linear.selection import Grid, grid_of
from forebay.kernels.products.linear_q import gpu_raw
from forebay.kernels.products.linear_q.gpu_dequantized import bind_dequantized

OP = "linear_q"
INTERPRETED = bool(triton.knobs.runtime.interpret)
VECTOR_STAGES = tl.constexpr(4)
WIDEN = tl.constexpr(INTERPRETED)  # the interpreter multiplies the bit patterns of bf16 matrices


@triton.jit
def load_halves(rows, below, index, left, GROUPS: tl.constexpr, WHOLE: tl.constexpr, DTYPE: tl.constexpr):
    """Values [BN, GROUPS] of DTYPE at halves `index` on of rows that begin `below` [BN, 1] words behind `rows`.

    Those from `left` on are 0, unless WHOLE: then all are read, and several begin at an even index. They are read in
    words, as loads of less than 32 bits are not pipelined.
    """
    if WHOLE and GROUPS > 1:
        words = tl.load(rows + index // 2 + (below + tl.arange(0, GROUPS // 2)[None, :]))
        bits = tl.reshape(tl.interleave(words & 0xFFFF, words >> 16), (below.shape[0], GROUPS))
    elif GROUPS == 1:
        place = tl.reshape(rows + (below + index // 2), (below.shape[0],))
        bits = tl.load(place) if WHOLE else tl.load(place, mask=left > 0, other=0)
        bits = (bits >> (index % 2 * 16).to(tl.uint32))[:, None]
    else:
        group = tl.arange(0, GROUPS)
        each = (index + group)[None, :]
        words = tl.load(rows + (below + each // 2), mask=(group < left)[None, :], other=0)
        bits = words >> (each % 2 * 16).to(tl.uint32)
    return bits.to(tl.uint16).to(DTYPE, bitcast=True)


@triton.jit
def columns_of(x, BITS: tl.constexpr):
    """The columns of x [BM, BK] that meet each part of `unpacking`: four [BK / 4, BM], or two [BK / 2, BM], twice."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1] * BITS // 16
    if WIDEN:
        x = x.to(tl.float32)
    if BITS == 4:
        # Element 8 j + 4 h + 2 a + b of x; part 2 a + b holds (j, h).
        even, odd = tl.split(tl.reshape(x, (ROWS, WIDTH // 2, 2, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        x0, x1 = tl.trans(tl.reshape(x0, (ROWS, WIDTH))), tl.trans(tl.reshape(x1, (ROWS, WIDTH)))
        x2, x3 = tl.trans(tl.reshape(x2, (ROWS, WIDTH))), tl.trans(tl.reshape(x3, (ROWS, WIDTH)))
        parts = x0, x1, x2, x3
    else:
        x0, x1 = tl.split(tl.reshape(x, (ROWS, WIDTH // 2, 2, 2)))
        x0, x1 = tl.trans(tl.reshape(x0, (ROWS, WIDTH))), tl.trans(tl.reshape(x1, (ROWS, WIDTH)))
        parts = x0, x1, x0, x1
    return parts


@triton.jit
def linear_quantized_matrix_kernel(
    x_ptr, word_ptr, half_ptr, counter_ptr, partial_ptr, out_ptr, bias_ptr, multiplier_ptr, residual_ptr,
    m, n, om, pm, rm, k, xm, row_units, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MULTIPLIER: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, ACCUMULATE: tl.constexpr, SYMMETRIC: tl.constexpr, STAGES: tl.constexpr,
    PTX: tl.constexpr, WHOLE: tl.constexpr,
    second_ptr=None, second_n=0, second_om=0, second_out_ptr=None, second_bias_ptr=None,
    third_ptr=None, third_n=0, third_om=0, third_out_ptr=None, third_bias_ptr=None,
    SEGMENTS: tl.constexpr = 1, GATED: tl.constexpr = 0,
):  # fmt: skip
    """Program (tile of rows and columns, split of K); word_ptr are rows as 32-bit values, half_ptr gives scales' dtype.

    row_units is the bytes between rows over 16: the compiler learns from the multiplication that rows are aligned.
    WHOLE: K is a multiple of BK (not on AMD, where Triton 3.6 breaks off over loads without masks). 16 rows of x are
    two products of 8: of 16, Hopper's compiler makes one for which x
    passes through shared memory again, with a barrier for every part.
    """
    WORDS: tl.constexpr = BK * BITS // 32
    GROUPS: tl.constexpr = BK // GROUP
    GROUP_WORDS: tl.constexpr = GROUP * BITS // 32
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    HALF: tl.constexpr = half_ptr.dtype.element_ty
    TWO: tl.constexpr = BM == 16
    NARROW: tl.constexpr = 8 if TWO else BM
    tile_m, tile_n = tile_of(tl.cdiv(m, BM), column_tiles(n, second_n, third_n, BN, SEGMENTS, GATED))
    tile, split = tl.program_id(0), tl.program_id(1)
    if SEGMENTS > 1:
        tile_n, n, om, out_ptr, bias_ptr, word_ptr = segment_of(
            tile_n, n, om, out_ptr, bias_ptr, word_ptr, second_n, second_om, second_out_ptr, second_bias_ptr,
            second_ptr, third_n, third_om, third_out_ptr, third_bias_ptr, third_ptr, BN,
        )  # fmt: skip
    row = tile_m * BM + tl.arange(0, NARROW)
    column = columns_at(tile_n, BN, GATED)
    lowest = tile_n * (BN // 2 if GATED else BN)
    # What is the same for the whole tile stays a scalar, and what is not fits in 32 bits.
    below = (tl.minimum(column, n - 1) - lowest)[:, None] * (row_units * 4)
    at, word = tl.arange(0, BK), tl.arange(0, WORDS)
    if WHOLE:
        groups = groups // GROUPS * GROUPS
    steps = tl.cdiv(tl.cdiv(groups, GROUPS), SPLITS)
    first = split * steps * GROUPS
    x_at = x_ptr + (tile_m * BM).to(tl.int64) * xm + first * GROUP
    x_place = tl.arange(0, NARROW)[:, None] * xm + at[None, :]
    rows = rows_at(word_ptr, second_ptr, BN, GATED) + lowest.to(tl.int64) * (row_units * 4)
    word_at = rows + first * GROUP_WORDS
    word_place = below + word[None, :]
    scale_at = groups * (GROUP * BITS // 16)
    sums = tl.zeros((BN, NARROW), tl.float32)
    more = tl.zeros((BN, NARROW), tl.float32)
    for begin in tl.range(first, tl.minimum(groups, first + steps * GROUPS), GROUPS, num_stages=STAGES):
        left = groups - begin
        inside = (row < m)[:, None]
        if WHOLE:
            w = tl.load(word_at + word_place)
        else:
            w = tl.load(word_at + word_place, mask=word[None, :] < left * GROUP_WORDS, other=0)
            inside = inside & (at < k - begin * GROUP)[None, :]
        x = tl.load(x_at + x_place, mask=inside, other=0.0)
        factors = columns_of(x, BITS)
        if TWO:
            inside = (row + NARROW < m)[:, None]
            if not WHOLE:
                inside = inside & (at < k - begin * GROUP)[None, :]
            second = columns_of(tl.load(x_at + NARROW * xm + x_place, mask=inside, other=0.0), BITS)
        scale = load_halves(rows, below, scale_at + begin, left, GROUPS, WHOLE, HALF)
        low = scale.to(tl.float32) * -(1 << BITS - 1) if SYMMETRIC else load_halves(
            rows, below, scale_at + groups + begin, left, GROUPS, WHOLE, HALF)  # rounded to DTYPE as the scale is
        scale, low = spread(scale, GROUP_WORDS, PTX, DTYPE), spread(low, GROUP_WORDS, PTX, DTYPE)
        for part in tl.static_range(16 // BITS):
            weights = weights_of(w, scale, low, part, BITS, PTX, DTYPE)
            if WIDEN:
                weights = weights.to(tl.float32)
            sums = tl.dot(weights, factors[part], sums)
            if TWO:
                more = tl.dot(weights, second[part], more)
        x_at += BK
        word_at += WORDS
    if TWO:
        sums = tl.reshape(tl.permute(tl.join(sums, more), (0, 2, 1)), (BN, BM))
    row = tile_m * BM + tl.arange(0, BM)
    finish(
        sums, row[None, :], column[:, None], tl.arange(0, BM)[None, :], tl.arange(0, BN)[:, None], tile, split,
        counter_ptr, partial_ptr, out_ptr, bias_ptr, multiplier_ptr, residual_ptr, m, n, om, pm, rm,
        ACTIVATION, HAS_BIAS, HAS_MULTIPLIER, HAS_RESIDUAL, ACCUMULATE, BM, BN, SPLITS, second_bias_ptr, GATED,
    )  # fmt: skip


@triton.jit
def elements_of(x, BITS: tl.constexpr):
    """The elements of x [BK] in each word's place: eight [BK / 8], or four [BK / 4], twice."""
    WORDS: tl.constexpr = x.shape[0] * BITS // 32
    if BITS == 4:
        even, odd = tl.split(tl.reshape(x, (WORDS, 2, 2, 2)))
        x04, x26 = tl.split(even)
        x15, x37 = tl.split(odd)
        x0, x4 = tl.split(x04)
        x1, x5 = tl.split(x15)
        x2, x6 = tl.split(x26)
        x3, x7 = tl.split(x37)
    else:
        even, odd = tl.split(tl.reshape(x, (WORDS, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        x4, x5, x6, x7 = x0, x1, x2, x3
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def linear_quantized_vector_kernel(
    x_ptr, word_ptr, half_ptr, counter_ptr, partial_ptr, out_ptr, bias_ptr, multiplier_ptr, residual_ptr,
    m, n, om, pm, rm, k, xm, row_units, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MULTIPLIER: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, ACCUMULATE: tl.constexpr, SYMMETRIC: tl.constexpr,
    second_ptr=None, second_n=0, second_om=0, second_out_ptr=None, second_bias_ptr=None,
    third_ptr=None, third_n=0, third_om=0, third_out_ptr=None, third_bias_ptr=None,
    SEGMENTS: tl.constexpr = 1, GATED: tl.constexpr = 0,
):  # fmt: skip
    """Program (tile of columns, split of K): BM = M is 1 or 2; weights and sums in fp32."""
    PER_WORD: tl.constexpr = 32 // BITS
    PARTS: tl.constexpr = PER_WORD // 2
    WORDS: tl.constexpr = BK // PER_WORD
    GROUPS: tl.constexpr = BK // GROUP
    GROUP_WORDS: tl.constexpr = GROUP // PER_WORD
    HALF: tl.constexpr = half_ptr.dtype.element_ty
    tile, split = tl.program_id(0), tl.program_id(1)
    tile_n = tile
    if SEGMENTS > 1:
        tile_n, n, om, out_ptr, bias_ptr, word_ptr = segment_of(
            tile_n, n, om, out_ptr, bias_ptr, word_ptr, second_n, second_om, second_out_ptr, second_bias_ptr,
            second_ptr, third_n, third_om, third_out_ptr, third_bias_ptr, third_ptr, BN,
        )  # fmt: skip
    column = columns_at(tile_n, BN, GATED)
    lowest = tile_n * (BN // 2 if GATED else BN)
    below = (tl.minimum(column, n - 1) - lowest)[:, None] * (row_units * 4)
    at, word = tl.arange(0, BK), tl.arange(0, WORDS)
    steps = tl.cdiv(tl.cdiv(groups, GROUPS), SPLITS)
    first = split * steps * GROUPS
    rows = rows_at(word_ptr, second_ptr, BN, GATED) + lowest.to(tl.int64) * (row_units * 4)
    word_at = rows + (below + word[None, :])
    scale_at = groups * (GROUP * BITS // 16)
    sum0 = tl.zeros((BN, WORDS), tl.float32)
    sum1 = tl.zeros((BN, WORDS), tl.float32)
    for begin in tl.range(first, tl.minimum(groups, first + steps * GROUPS), GROUPS, num_stages=VECTOR_STAGES):
        left = groups - begin
        w = tl.load(word_at + begin * GROUP_WORDS, mask=word[None, :] < left * GROUP_WORDS, other=0)
        place = begin * GROUP + at
        x0 = elements_of(tl.load(x_ptr + place, mask=place < k, other=0.0), BITS)
        if BM == 2:
            x1 = elements_of(tl.load(x_ptr + xm + place, mask=place < k, other=0.0), BITS)
        scale = load_halves(rows, below, scale_at + begin, left, GROUPS, False, HALF)
        low = scale.to(tl.float32) * -(1 << BITS - 1) if SYMMETRIC else load_halves(
            rows, below, scale_at + groups + begin, left, GROUPS, False, HALF)
        scale, low = spread(scale, GROUP_WORDS, False, tl.float32), spread(low, GROUP_WORDS, False, tl.float32)
        # A code in the mantissa of 2^23, which is subtracted again (exact), needs no conversion.
        halves = w | 0x4B000000, (w >> 16) | 0x4B000000
        for element in tl.static_range(PER_WORD):
            bits = halves[element // PARTS] & (0x4B000000 | ((1 << BITS) - 1) << (element % PARTS * BITS))
            weight = (bits.to(tl.float32, bitcast=True) - 8388608.0) * (scale * 2.0 ** -(element % PARTS * BITS)) + low
            sum0 += weight * x0[element].to(tl.float32)[None, :]
            if BM == 2:
                sum1 += weight * x1[element].to(tl.float32)[None, :]
    y = tl.join(tl.sum(sum0, 1), tl.sum(sum1, 1)) if BM == 2 else tl.sum(sum0, 1)[:, None]
    row = tl.arange(0, BM)[None, :]
    finish(
        y, row, column[:, None], row, tl.arange(0, BN)[:, None], tile, split, counter_ptr, partial_ptr,
        out_ptr, bias_ptr, multiplier_ptr, residual_ptr, m, n, om, pm, rm,
        ACTIVATION, HAS_BIAS, HAS_MULTIPLIER, HAS_RESIDUAL, ACCUMULATE, BM, BN, SPLITS, second_bias_ptr, GATED,
    )  # fmt: skip


def plan(
    m: int, n: int, stored: Packing, impl: str, multiprocessors: int, widths: tuple[int, ...] = ()
) -> tuple[str, selection.Setting, Grid]:
    """(implementation, setting, grid) of a launch of our kernels."""
    kind, k = selection.KIND_OF_BITS[stored.bits], max(1, stored.in_features)
    implementation, setting, splits = selection.parse(kind, impl, m, n, k, multiprocessors)
    setting = selection.for_group(setting, stored.group_size)
    grid = grid_of(implementation, setting, splits, m, n, k, group_size=stored.group_size, widths=widths)
    return implementation, setting, grid


def check_rows(rows: Tensor, stored: Packing, x: Tensor) -> None:
    """ValueError unless rows are packed rows on x's device that 128-bit loads can take."""
    _, k, group_size, scale_dtype, *_ = stored
    if group_size not in GROUP_SIZES and row_sizes.product_refusal(k, group_size):
        fail(OP, "group_size", f"must be one of {GROUP_SIZES}, or a multiple of 32 for 'aten', got {group_size}")
    if scale_dtype not in SCALE_DTYPES:
        fail(OP, "scale_dtype", f"must be one of {SCALE_DTYPES}, got {scale_dtype}")
    check_tensor(OP, "rows", rows, device=x.device, dtype=torch.uint8)
    if rows.dim() != 2 or rows.shape[1] != stored.row_nbytes:
        fail(OP, "rows", f"must be [N, {stored.row_nbytes}] as in_features and group_size ask, got {tuple(rows.shape)}")
    if rows.shape[0] > 1 and rows.stride(0) % 16:
        fail(OP, "rows", f"must lie a multiple of 16 bytes apart, got strides {rows.stride()}")
    if rows.storage_offset() % 16:
        fail(OP, "rows", "must start at a multiple of 16 bytes")


def linear_q(
    x: Tensor, rows: Tensor, bias: Tensor | None, stored: Packing, after: After = PLAIN, out: Tensor | None = None,
    impl: str = "", workspace: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """act(x W^T + bias) * multiplier + residual into out [..., N], or a new tensor.

    x [..., K], residual, multiplier and out are of one dtype, fp16, bf16 or, multiplied by torch alone, fp32; rows
    uint8 [N, R] hold W in groups of GROUP_SIZES along K, or what "aten" takes. impl is a name of `selection`; "" asks
    its table. Weights are rounded to x's dtype once, scales to it first. ValueError names what is wrong.
    """
    run, result = _bind(x, rows, bias, stored, after, out, impl, workspace)
    run()
    return result


def bind_linear_q(
    x: Tensor, rows: Tensor, bias: Tensor | None, stored: Packing, after: After, out: Tensor, impl: str = ""
) -> Callable[[], None]:  # fmt: skip
    """linear_q as a call without arguments, on the tensors' contents at each call; the checks are made here."""
    return _bind(x, rows, bias, stored, after, out, impl, None)[0]


def bind_joined(use: Use, stored: Packing, after: After) -> Callable[[], None]:
    """A launch with several weights (`joined`) as a call without arguments, by one of our own kernels."""
    x, weights, biases = use.args
    for rows in weights[1:]:
        check_rows(rows, stored, x)
    others = Others(weights[1:], biases[1:], use.out[1:])
    return _bind(x, weights[0], biases[0], stored, after, use.out[0], use.impl, None, others)[0]


def _bind(
    x: Tensor, rows: Tensor, bias: Tensor | None, stored: Packing, after: After, out: Tensor | None, impl: str,
    workspace: Tensor | None, others: Others = ALONE,
) -> tuple[Callable[[], None], Tensor]:  # fmt: skip
    """(the launch as a call without arguments, what it fills)."""
    check_tensor(OP, "x", x, dtype=(torch.float16, torch.bfloat16, torch.float32))
    check_rows(rows, stored, x)
    (bits, k, group_size, scale_dtype, symmetric, codebook), n = stored, rows.shape[0]
    operands = prepare(OP, x, n, k, bias, after, out, False, (x.dtype,))
    others, widths = others.checked(OP, operands, rows), others.widths(n)
    m = operands.x.shape[0]
    result = operands.out.view(*x.shape[:-1], n) if out is None else out
    if result.numel() == 0:
        return (lambda: None), result
    if codebook:
        impl = impl or coded(m, group_size, codebook)
    elif not impl:
        ours = group_size in GROUP_SIZES
        impl = selection.choose(selection.KIND_OF_BITS[bits], m, n, max(1, k)) if ours else selection.ATEN
    if impl == selection.ATEN or x.dtype == torch.float32 or (codebook and not impl.startswith(selection.RAW)):
        return bind_dequantized(x, rows, bias, stored, after, result), result
    if group_size not in GROUP_SIZES:
        fail(OP, "group_size", f"must be one of {GROUP_SIZES} for {impl!r}, got {group_size}")
    implementation, setting, grid = plan(m, sum(widths), stored, impl, sm_count(x.device), widths)
    if implementation == "raw":
        return gpu_raw.bind_raw(operands, rows, stored, setting, grid, workspace, others), result
    vector = implementation == "gemv"
    kernel: Any = linear_quantized_vector_kernel if vector else linear_quantized_matrix_kernel
    programs = grid.rows * grid.columns, grid.splits
    views = rows.view(torch.uint32), rows.view(scale_dtype)
    strides = k, operands.x.stride(0), rows.stride(0) // 16, triton.cdiv(k, group_size)
    arguments = (*operands.arguments(), *strides)
    constants = operands.constants() | {
        "BITS": bits, "GROUP": group_size, "BM": grid.tile_elements // setting.bn, "BN": setting.bn, "BK": setting.bk,
        "SPLITS": grid.splits, "SYMMETRIC": symmetric, "num_warps": setting.warps,
    } | others.constants(rows, torch.uint32)  # fmt: skip
    if not vector:
        ptx = torch.version.hip is None and not INTERPRETED
        whole = torch.version.hip is None and k > 0 and k % setting.bk == 0
        constants |= {"STAGES": stages(setting.stages), "PTX": ptx, "WHOLE": whole}

    def launch(counters: Tensor, partials: Tensor) -> KernelCall:
        return kernel_call(kernel, programs, operands.x, *views, counters, partials, *arguments, **constants)

    return bind_split(OP, grid, x.device, workspace, launch), result
