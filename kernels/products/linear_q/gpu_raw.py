"""`linear_q` in Triton over raw codes: 1024 + q, or 64 + q, in fp16 by one instruction for two codes of a word.

The tensor cores multiply these by x in fp16. A group's sum starts at what 1024 and 64 add to it, and its scale is
applied to the sum, not to its codes: no instruction is spent on a weight but the one that makes it. A kernel before
(`raw_order_kernel`) puts the elements of each group of x in the order in which parts of words meet them, and adds them.
Codes of fp8 (e4m3) and of fp4 (e2m1) become their numbers over a power of two, by four instructions for two of them.
Codes of other codebooks index tables of eight bytes in registers, one for each byte of a number.

x in bf16 is scaled to fp16 group by group, by powers of two. Values below 2^-29 of their group's largest round; a group
that holds an infinity or NaN gives NaN. Lows and scales are taken as they are stored, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.formats.codebooks import CODEBOOKS, FOURS
from forebay.kernels.formats.packing import Packing
from forebay.kernels.gpu_support.arguments import fail, stages
from forebay.kernels.gpu_support.codebooks import E2M1, E4M3, coded_scale, number_of
from forebay.kernels.gpu_support.launches import KernelCall, bound, bound_with_scratch, kernel_call
from forebay.kernels.products.linear import raw_layout, selection
from forebay.kernels.products.linear.gpu_arguments import ALONE, Operands, Others
from forebay.kernels.products.linear.gpu_epilogue import columns_at, finish, rows_at, segment_of
from forebay.kernels.products.linear.selection import HELD_COUNTERS_NBYTES, Grid

INTERPRETED = bool(triton.knobs.runtime.interpret)
WIDEN = tl.constexpr(INTERPRETED)  # the interpreter multiplies the bit patterns of 16-bit matrices
TURN = tl.constexpr(raw_layout.TURN)
# Nibbles 0 and 4 of a word below 0x64, and 1 and 5 below 0x54: two halves of 1024 + q or 64 + q. (An instruction takes
# one constant, so the other is a register's; without this the compiler spends two instructions.)
EVEN_NIBBLES = tl.constexpr("{ .reg .b32 g; mov.b32 g, 0x64006400; lop3.b32 $0, $1, 0x000F000F, g, 0xEA; }")
ODD_NIBBLES = tl.constexpr("{ .reg .b32 g; mov.b32 g, 0x54005400; lop3.b32 $0, $1, 0x00F000F0, g, 0xEA; }")
# Bytes 0 and 2, or 1 and 3, of a word below 0x64: two halves of 1024 + q.
EVEN_BYTES = tl.constexpr("prmt.b32 $0, $1, 0x64646464, 0x4240;")
ODD_BYTES = tl.constexpr("prmt.b32 $0, $1, 0x64646464, 0x4341;")


def _look_up(codebook: str) -> str:
    """PTX for the numbers in fp16 of two codes: their bytes are chosen from tables of eight. The codes' low bits are
    bits 0 to 2 of $1 and 4 to 6 of $2, the high ones bits 15 and 31 of $3. Of a book with both signs the upper half is
    the lower one's negative."""
    numbers = torch.tensor(FOURS[codebook]).half().view(torch.int16).tolist()
    both_signs = codebook != "nf4"
    tables = []  # for each eight codes: low bytes, high bytes, each in two words
    for first in range(0, 8 if both_signs else 16, 8):
        for shift in (0, 8):
            each = bytes(number >> shift & 255 for number in numbers[first : first + 8])
            tables += [int.from_bytes(each[:4], "little"), int.from_bytes(each[4:], "little")]
    names = [f"t{i}" for i in range(len(tables))]
    filled = "".join(f" mov.b32 {name}, {word:#x};" for name, word in zip(names, tables, strict=True))
    ptx = (f"{{ .reg .b32 i, j, x, y, {', '.join(names)};{filled} lop3.b32 i, $1, $2, 0xF, 0xE4;"
           " prmt.b32 x, t0, t1, i; prmt.b32 y, t2, t3, i; prmt.b32 x, x, y, 0x5140;")
    if both_signs:
        return ptx + " lop3.b32 $0, $3, 0x80008000, x, 0xEA; }"
    return ptx + (" prmt.b32 j, t4, t5, i; prmt.b32 y, t6, t7, i; prmt.b32 y, j, y, 0x5140;"
                  " prmt.b32 j, $3, $3, 0xBB99; lop3.b32 $0, j, y, x, 0xCA; }")


LOOK_UP = tl.constexpr(tuple(map(_look_up, CODEBOOKS[CODEBOOKS.index("e2m1") + 1 :])))


@triton.jit
def raw_order_kernel(
    x_ptr, ordered_ptr, sum_ptr, m, k, xm, width, padded,
    BITS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, SCALED: tl.constexpr, SYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Program (turn, row of x [M, K]; rows from M on are 0): what linear_raw_kernel takes of it.

    Group g of a turn is a row by itself, 0 in the place of other groups: row (tile EACH + g) BM + r of fp16 [padded,
    width], part by part. sum_ptr [turns, 3, padded], fp32: where its sum starts, the sum of x, what fp16 is scaled by.
    """
    WORD: tl.constexpr = 32 // BITS
    PARTS: tl.constexpr = WORD // 2
    EACH: tl.constexpr = TURN // GROUP
    turn, row = tl.program_id(0), tl.program_id(1)
    group = tl.arange(0, EACH)
    at = tl.arange(0, TURN)
    own = (at // GROUP)[None, :] == group[:, None]
    place = turn * TURN + at
    x = tl.load(x_ptr + row.to(tl.int64) * xm + place, mask=(place < k) & (row < m), other=0.0).to(tl.float32)
    x = tl.where(own, x[None, :], 0.0)
    factor = tl.full((EACH,), 1.0, tl.float32)
    halves = x
    if SCALED:
        largest = tl.max(tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0), 1)
        exponent = tl.minimum(tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) & 255, 15), 254)
        factor = ((exponent - 14) << 23).to(tl.float32, bitcast=True)  # the largest lies in [2^14, 2^15)
        halves = x * ((268 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    halves = halves.to(tl.float16)
    part = at % PARTS
    magic = tl.where(part % 2 == 0, 1024.0, 64.0 if BITS == 4 else 1024.0)
    if SYMMETRIC:
        magic += 1 << BITS - 1
    start = -tl.sum(halves.to(tl.float32) * magic[None, :], 1)
    column = part * (TURN // PARTS) + at // WORD * 2 + at % WORD // PARTS
    target = (row // BM * EACH + group) * BM + row % BM
    tl.store(ordered_ptr + target.to(tl.int64)[:, None] * width + turn * TURN + column[None, :], halves)
    sums = sum_ptr + turn * (3 * padded) + target
    tl.store(sums, start)
    tl.store(sums + padded, tl.sum(x, 1))
    tl.store(sums + 2 * padded, factor)


@triton.jit
def raw_codes(w, PART: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr):
    """Codes of elements PART and PART + 16 / BITS of each word of w [BN, W], in turn: over 1024, or of 4 bits in odd
    parts over 64, in fp16 [BN, 2 W]."""
    if PTX:
        EVEN: tl.constexpr = EVEN_NIBBLES if BITS == 4 else EVEN_BYTES
        ODD: tl.constexpr = ODD_NIBBLES if BITS == 4 else ODD_BYTES
        pair = tl.inline_asm_elementwise(
            EVEN if PART % 2 == 0 else ODD, "=r,r", [w if PART < 2 else w >> 8], dtype=tl.uint32, is_pure=True, pack=1
        )
    elif BITS == 4:
        shifted = w if PART < 2 else w >> 8
        pair = (shifted & 0x000F000F) | 0x64006400 if PART % 2 == 0 else (shifted & 0x00F000F0) | 0x54005400
    else:
        pair = ((w if PART == 0 else w >> 8) & 0x00FF00FF) | 0x64006400
    first = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    second = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.join(first, second), (w.shape[0], 2 * w.shape[1]))


@triton.jit
def looked_up(w, PART: tl.constexpr, CODEBOOK: tl.constexpr, PTX: tl.constexpr):
    """Two halves in a word: numbers in fp16 of elements PART and PART + 4 of each word of w."""
    if PTX:
        TABLE: tl.constexpr = LOOK_UP[CODEBOOK - E2M1 - 1]
        places = w & 0x77777777
        given = [places >> (4 * PART), places >> (4 * PART + 12), w << (12 - 4 * PART)]
        pair = tl.inline_asm_elementwise(TABLE, "=r,r,r,r", given, dtype=tl.uint32, is_pure=True, pack=1)
    else:
        first = number_of(((w >> (4 * PART)) & 15).to(tl.int32), CODEBOOK).to(tl.float16)
        second = number_of(((w >> (4 * PART + 16)) & 15).to(tl.int32), CODEBOOK).to(tl.float16)
        first = first.to(tl.uint16, bitcast=True).to(tl.uint32)
        pair = first | (second.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    return pair


@triton.jit
def raw_numbers(w, PART: tl.constexpr, CODEBOOK: tl.constexpr, PTX: tl.constexpr):
    """Numbers of the same elements in a codebook. Those over 2^8 (e4m3) or 2^14 (e2m1) are exact in fp16: the
    sign and the magnitude of a code are moved to where fp16 has its sign, exponent and first bits. Others are looked
    up."""
    if CODEBOOK == E4M3:
        top = w << 8 if PART == 0 else w
        pair = (top & 0x80008000) | ((top >> 1) & 0x3F803F80)
    elif CODEBOOK == E2M1:
        top = w << (12 - 4 * PART)
        pair = (top & 0x80008000) | ((top >> 3) & 0x0E000E00)
    else:
        pair = looked_up(w, PART, CODEBOOK, PTX)
    first = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    second = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.join(first, second), (w.shape[0], 2 * w.shape[1]))


@triton.jit
def halves_at(rows, below, index, left, GROUPS: tl.constexpr, WHOLE: tl.constexpr, HALF: tl.constexpr):
    """Halves [BN, GROUPS] of HALF from `index` on of rows that begin `below` [BN, 1] words behind `rows`; 0 from
    `left` on."""
    group = tl.arange(0, GROUPS)[None, :]
    at = rows + (below + (index + group) // 2)
    word = tl.load(at) if WHOLE else tl.load(at, mask=group < left, other=0)
    return (word >> ((index + group) % 2 * 16).to(tl.uint32)).to(tl.uint16).to(HALF, bitcast=True)


@triton.jit
def linear_raw_kernel(
    ordered_ptr, sum_ptr, word_ptr, half_ptr, counter_ptr, partial_ptr, out_ptr, bias_ptr, multiplier_ptr, residual_ptr,
    m, n, om, pm, rm, row_units, groups, width, padded,
    BITS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MULTIPLIER: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACCUMULATE: tl.constexpr, SYMMETRIC: tl.constexpr, CODEBOOK: tl.constexpr, SCALED: tl.constexpr,
    STAGES: tl.constexpr, PTX: tl.constexpr, WHOLE: tl.constexpr,
    second_ptr=None, second_n=0, second_om=0, second_out_ptr=None, second_bias_ptr=None,
    third_ptr=None, third_n=0, third_om=0, third_out_ptr=None, third_bias_ptr=None,
    SEGMENTS: tl.constexpr = 1, GATED: tl.constexpr = 0,
):  # fmt: skip
    """Program (tile of rows and columns, split of K): word_ptr are rows as 32-bit values, half_ptr gives scales' dtype.

    A turn multiplies by 128 codes of a row at once, which may be several groups: each is a row of x by itself.
    WHOLE: the groups fill every turn. row_units is the bytes between rows over 16. CODEBOOK: 0, or another.
    """
    WORDS: tl.constexpr = TURN * BITS // 32
    COLUMNS: tl.constexpr = 2 * WORDS
    EACH: tl.constexpr = TURN // GROUP
    HALF: tl.constexpr = half_ptr.dtype.element_ty
    tile, split = tl.program_id(0), tl.program_id(1)
    tiles_m = tl.cdiv(m, BM)
    tile_m, tile_n = tile % tiles_m, tile // tiles_m  # those that share weights run side by side
    if SEGMENTS > 1:
        tile_n, n, om, out_ptr, bias_ptr, word_ptr = segment_of(
            tile_n, n, om, out_ptr, bias_ptr, word_ptr, second_n, second_om, second_out_ptr, second_bias_ptr,
            second_ptr, third_n, third_om, third_out_ptr, third_bias_ptr, third_ptr, BN,
        )  # fmt: skip
    row, column = tile_m * BM + tl.arange(0, BM), columns_at(tile_n, BN, GATED)
    lowest = tile_n * (BN // 2 if GATED else BN)
    wide = tile_m * (BM * EACH) + tl.arange(0, BM * EACH)
    word = tl.arange(0, WORDS)[None, :]
    below = ((tl.minimum(column, n - 1) - lowest) * (row_units * 4))[:, None]
    rows = rows_at(word_ptr, second_ptr, BN, GATED) + lowest.to(tl.int64) * (row_units * 4)
    turns = tl.cdiv(groups, EACH)
    steps = tl.cdiv(turns, SPLITS)
    first = split * steps
    word_place, x_place = below + word, wide[:, None] * width + tl.arange(0, COLUMNS)[None, :]
    word_at, x_at, sum_at = rows + first * WORDS, ordered_ptr + first * TURN, sum_ptr + first * (3 * padded)
    scale_at = groups * (GROUP * BITS // 16)
    total = tl.zeros((BN, BM), tl.float32)
    for turn in tl.range(first, tl.minimum(turns, first + steps), 1, num_stages=STAGES):
        left = groups - turn * EACH
        if WHOLE:
            w = tl.load(word_at + word_place, eviction_policy="evict_first")
        else:
            there = word < left * (GROUP * BITS // 32)
            w = tl.load(word_at + word_place, mask=there, other=0, eviction_policy="evict_first")
        if CODEBOOK == 0:
            found = tl.broadcast_to(tl.load(sum_at + wide)[None, :], (BN, BM * EACH))
        else:
            found = tl.zeros((BN, BM * EACH), tl.float32)
        for part in tl.static_range(16 // BITS):
            x = tl.load(x_at + part * COLUMNS + x_place)
            codes = raw_codes(w, part, BITS, PTX) if CODEBOOK == 0 else raw_numbers(w, part, CODEBOOK, PTX)
            if WIDEN:
                x, codes = x.to(tl.float32), codes.to(tl.float32)
            found = tl.dot(codes, tl.trans(x), found)
        if SCALED:
            found *= tl.load(sum_at + 2 * padded + wide)[None, :]
        scale = halves_at(rows, below, scale_at + turn * EACH, left, EACH, WHOLE, HALF)
        low = scale
        if not SYMMETRIC:
            low = halves_at(rows, below, scale_at + groups + turn * EACH, left, EACH, WHOLE, HALF)
        if CODEBOOK == 0:
            scale = scale.to(tl.float32)
        else:
            OVER: tl.constexpr = 256.0 if CODEBOOK == E4M3 else 16384.0 if CODEBOOK == E2M1 else 1.0
            scale = coded_scale(scale, low, SYMMETRIC) * OVER
        if EACH == 1:
            total += scale * found
        else:
            total += tl.sum(tl.reshape(found, (BN, EACH, BM)) * scale[:, :, None], 1)
        if not SYMMETRIC and CODEBOOK == 0:
            low = low.to(tl.float32)
            sums = tl.load(sum_at + padded + wide)
            if EACH == 1:
                total += low * sums[None, :]
            else:
                total += tl.sum(low[:, :, None] * tl.reshape(sums, (EACH, BM))[None, :, :], 1)
        word_at += WORDS
        x_at += TURN
        sum_at += 3 * padded
    finish(
        total, row[None, :], column[:, None], tl.arange(0, BM)[None, :], tl.arange(0, BN)[:, None], tile, split,
        counter_ptr, partial_ptr, out_ptr, bias_ptr, multiplier_ptr, residual_ptr, m, n, om, pm, rm,
        ACTIVATION, HAS_BIAS, HAS_MULTIPLIER, HAS_RESIDUAL, ACCUMULATE, BM, BN, SPLITS, second_bias_ptr, GATED,
    )  # fmt: skip


def bind_raw(
    operands: Operands, rows: Tensor, stored: Packing, setting: selection.Setting, grid: Grid,
    workspace: Tensor | None, others: Others = ALONE,
) -> Callable[[], None]:  # fmt: skip
    """Both launches as a call without arguments, with operands and rows that have been checked.

    `workspace` is as of `bind_split`, or None: then the scratch of the stream serves.
    """
    if not raw_layout.serves(stored.group_size, stored.codebook):
        fail("linear_q", "group_size", f"must be one of {raw_layout.GROUP_SIZES} for 'raw', got {stored.group_size}")
    x, scaled = operands.x, operands.x.dtype == torch.bfloat16
    layout = raw_layout.of(x.shape[0], stored.in_features, stored.group_size)
    shape = layout.shape
    first, end = grid.workspace_nbytes - grid.counters_nbytes, layout.nbytes
    constants = operands.constants() | {
        "BITS": stored.bits, "GROUP": stored.group_size, "BM": layout.tile_rows, "BN": setting.bn,
        "SPLITS": grid.splits, "SYMMETRIC": stored.symmetric, "CODEBOOK": CODEBOOKS.index(stored.codebook),
        "SCALED": scaled, "STAGES": stages(setting.stages),
        "PTX": torch.version.hip is None and not INTERPRETED, "WHOLE": layout.is_whole,
        "num_warps": setting.warps,
    } | others.constants(rows, torch.uint32)  # fmt: skip

    def launches(values: Tensor, counters: Tensor) -> list[KernelCall]:
        ordered = values[first : first + layout.ordered_nbytes].view(torch.float16)
        sums = values[first + layout.ordered_nbytes : first + end].view(torch.float32)
        order = kernel_call(
            raw_order_kernel, (layout.turns, layout.m), x, ordered, sums, x.shape[0], stored.in_features,
            x.stride(0), *shape, BITS=stored.bits, GROUP=stored.group_size, BM=layout.tile_rows, SCALED=scaled,
            SYMMETRIC=stored.symmetric, num_warps=1,
        )  # fmt: skip
        kernel: Any = linear_raw_kernel
        return [order, kernel_call(
            kernel, (grid.rows * grid.columns, grid.splits), ordered, sums, rows.view(torch.uint32),
            rows.view(stored.scale_dtype), counters, values[:first].view(torch.float32), *operands.arguments(),
            rows.stride(0) // 16, triton.cdiv(stored.in_features, stored.group_size), *shape, **constants)]  # fmt: skip

    if workspace is not None:
        parts = workspace[grid.counters_nbytes :], workspace[: grid.counters_nbytes].view(torch.int32)
        calls = [bound(launch) for launch in launches(*parts)]

        def run() -> None:
            for call in calls:
                call()

        return run
    held = max(grid.counters_nbytes, HELD_COUNTERS_NBYTES)
    return bound_with_scratch(x.device, first + end, held // 4, launches)
