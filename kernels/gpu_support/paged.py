"""Tiles of K and V from a paged or contiguous cache, dequantised in registers: device functions and their arguments.

A tile is [T, DP]: T positions, and DP lanes of one head. A row of D values in groups of G is spread over lanes so that
each group begins at a multiple of GP, the power of two at or above G; lanes without a value hold anything finite or
what poisons the row anyway, and must meet zeros. Native values are one group of D. A cache of packed rows
(`kv_append_q`) has its scales and lows in the rows, so there are no pointers to pairs; its rows are rotated, and
`rotation` has what rotates queries and results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.attention.decode_attention.decode_shares import lane_count, lane_width
from forebay.kernels.formats.paged import BlockLayout

LOG2E = 1.4426950408889634
# The interpreter multiplies the bit patterns of bf16 numbers, and cuts fp32 off to make them.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc):
    """a @ b + acc in fp32 on tensor cores; fp32 factors in three TF32 products, about 2^-22 off."""
    if INTERPRETED:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    elif a.dtype == tl.float32:
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def first_seen(position, window):
    """The lowest position that a query at `position` sees, never negative; `kernels.attention` has it in Python."""
    chunk = tl.maximum(-window, 1)
    recent = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    return tl.where(window < 0, position // chunk * chunk, recent)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """fp32 x in dtype, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = tl.where(x == x, (bits & -65536).to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def lane_values(D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr):
    """(index along D of each of DP lanes, whether the lane holds a value)."""
    d = tl.arange(0, DP)
    valid = d < D
    if GP != DP:
        valid = d % GP < G
        d = d // GP * G + d % GP
        valid = valid & (d < D)
    return d, valid


@triton.jit
def from_half(bits):
    """fp32 of the fp16 number in the low half of a word."""
    return (bits & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def unpack_pair(word, dtype: tl.constexpr):
    """(scale, low) in fp32 from the 32-bit word of two fp16 or bf16 numbers, scale first."""
    if dtype == tl.bfloat16:
        scale = (word << 16).to(tl.float32, bitcast=True)
        low = (word & -65536).to(tl.float32, bitcast=True)
    else:
        scale, low = from_half(word), from_half(word >> 16)
    return scale, low


@triton.jit
def unpack_ending(words, group, held, CODES: tl.constexpr, GROUPS: tl.constexpr):
    """(scale, low) [T, GROUPS_P] in fp32 of rows at pointers [T, 1], behind CODES halves: GROUPS scales, then the lows.

    They are read in words: loads of less than 32 bits are not pipelined.
    """
    if group.shape[1] == GROUPS and CODES % 2 == 0:  # a row's ending is whole words: one wide load
        word = tl.load(words + (CODES // 2 + group), mask=held, other=0)
        if GROUPS == 1:
            scale, low = from_half(word), from_half(word >> 16)
        else:
            ending = tl.reshape(tl.interleave(word, word >> 16), (word.shape[0], 2, GROUPS))
            scale, low = tl.split(tl.permute(ending, (0, 2, 1)))
            scale, low = from_half(scale), from_half(low)
    else:
        scale_at = CODES + group
        low_at = scale_at + GROUPS
        scale = from_half(tl.load(words + scale_at // 2, mask=held, other=0) >> (scale_at % 2 * 16))
        low = from_half(tl.load(words + low_at // 2, mask=held, other=0) >> (low_at % 2 * 16))
    return scale, low


@triton.jit
def find_block(table_ptr, t0, end, TOKENS: tl.constexpr, T: tl.constexpr):
    """The block of each of T positions from t0, a multiple of T, on, as one number where they share it; no table: 0.

    Loops look it up one tile ahead: a look-up in the same turn would leave K and V with half the pipeline's stages.
    """
    if TOKENS == 0:
        block = tl.full((), 0, tl.int64)
    elif TOKENS >= T:
        block = tl.load(table_ptr + t0 // TOKENS, mask=t0 < end, other=0).to(tl.int64)
    else:
        t = t0 + tl.arange(0, T)
        block = tl.load(table_ptr + t // TOKENS, mask=t < end, other=0).to(tl.int64)
    return block


@triton.jit
def place_in_block(t, TOKENS: tl.constexpr):
    """Positions t counted from the beginning of their block, or of the sequence where there is no table."""
    if TOKENS != 0:
        t = t & (TOKENS - 1)
    return t


@triton.jit
def load_tile(
    ptr, pairs_ptr, block, inside, seen, stride_block, stride_row, stride_pairs,
    dtype: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """[T, DP] of dtype: rows `inside` of blocks `block`; what is not seen is 0. Strides in elements, pairs in words."""
    row = block * stride_block + inside.to(tl.int64) * stride_row
    if BITS == 0:
        d, valid = lane_values(D, DP, G, GP)
        mask = seen[:, None]
        if D != DP:
            mask = mask & valid[None, :]
        x = tl.load(ptr + row[:, None] + d[None, :], mask=mask, other=0.0)
    else:
        GROUPS: tl.constexpr = (D + G - 1) // G
        GROUPS_P: tl.constexpr = DP // GP
        group = tl.arange(0, GROUPS_P)[None, :]
        held = seen[:, None] & (group < GROUPS)
        if pairs_ptr is None:
            words = (ptr + row).to(tl.pointer_type(tl.int32))[:, None]
            scale, low = unpack_ending(words, group, held, GROUPS * G * BITS // 16, GROUPS)
        else:
            pair = (block * stride_pairs + inside * GROUPS)[:, None] + group
            scale, low = unpack_pair(tl.load(pairs_ptr + pair, mask=held, other=0), dtype)
        # Bytes of a row: lanes of codes (8 bits), or of pairs of codes (4 bits), whole groups.
        PER_BYTE: tl.constexpr = 8 // BITS
        at, valid = lane_values(GROUPS * G // PER_BYTE, DP // PER_BYTE, G // PER_BYTE, GP // PER_BYTE)
        mask = seen[:, None]
        if DP != GROUPS * G:
            mask = mask & valid[None, :]
        code = tl.load(ptr + row[:, None] + at[None, :], mask=mask, other=0)
        if BITS == 4:
            code = tl.interleave(code & 15, code >> 4)
        x = tl.reshape(code.to(tl.float32), (code.shape[0], GROUPS_P, GP))
        x = x * scale[:, :, None] + low[:, :, None]
        x = round_to(tl.reshape(x, (code.shape[0], DP)), dtype)
    return x


@triton.jit
def capped(s, softcap, CAPPED: tl.constexpr):
    """Scores times log2(e), from scores times scale * log2(e), or where capped times scale / softcap."""
    if CAPPED:  # tanh(x) = 1 - 2 / (exp(2 x) + 1), in which infinities come out right; softcap is times log2(e)
        s = softcap * (1.0 - 2.0 / (tl.exp2(s * 2.8853900817779268) + 1.0))
    return s


@triton.jit
def score_log2(q, k, scale_log2, softcap, CAPPED: tl.constexpr):
    """Attention scores [M, T] times log2(e) in fp32; scale_log2 is scale * log2(e), or scale / softcap where capped."""
    s = dot(q, tl.trans(k), tl.zeros((q.shape[0], k.shape[0]), tl.float32)) * scale_log2
    return capped(s, softcap, CAPPED)


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """(scale_log2, softcap) as score_log2 takes them."""
    return (scale / softcap, softcap * LOG2E) if softcap > 0 else (scale * LOG2E, 0.0)


@dataclass(frozen=True)
class CacheView:
    """Where a kernel finds K and V: pointers, strides of block (or sequence), head and row, and constants."""

    pointers: tuple[Tensor | None, ...]  # k, v, k pairs, v pairs
    strides: tuple[int, ...]  # of k: block, head, row; of v; of pairs: block, head
    constants: dict[str, Any]
    unit: int = 1  # bytes that all strides of packed rows are multiples of
    power: int = 0  # rows are rotated by Hadamard blocks of 2^power elements


class AttendedCache(NamedTuple):
    """What a launch attends over: `kv_heads` heads of at most `capacity` positions of position_nbytes each.

    Sequence b has lengths[b] positions before its queries, or all of them, and `length_more` beside them.
    """

    view: CacheView
    kv_heads: int
    capacity: int
    position_nbytes: int
    lengths: Tensor  # int64 [B]
    length_more: int = 0
    table: Tensor | None = None  # of a paged cache: int32 [B, M]


def lanes(head_dim: int, group: int) -> dict[str, int]:
    """The constants D, DP, G and GP."""
    return {"D": head_dim, "DP": lane_count(head_dim, group), "G": group, "GP": lane_width(head_dim, group)}


def paged_view(pool: Tensor, layout: BlockLayout) -> CacheView:
    """K and V of a pool of blocks that has been checked."""
    heads = layout.kv_heads
    constants = lanes(layout.head_dim, layout.group) | {"BITS": layout.bits, "TOKENS": layout.tokens}
    if not layout.bits:
        size = layout.dtype.itemsize
        typed = pool.view(layout.dtype)
        part = layout.part_nbytes // size
        strides = (typed.stride(0), part, layout.head_dim)
        return CacheView((typed, typed[:, heads * part :], None, None), (*strides, *strides, 0, 0), constants)
    words, part = pool.view(torch.int32), layout.part_nbytes
    strides = (pool.stride(0), part, layout.row_nbytes)
    at = layout.codes_nbytes // 4
    pointers = (pool, pool[:, heads * part :], words[:, at:], words[:, heads * part // 4 + at :])
    unit = math.gcd(16, *strides)
    return CacheView(pointers, (*strides, *strides, words.stride(0), part // 4), constants, unit)


def contiguous_view(k: Tensor, v: Tensor) -> CacheView:
    """K and V that are tensors [B, Hkv, L, D] of any strides but D's."""
    constants = lanes(k.shape[3], k.shape[3]) | {"BITS": 0, "TOKENS": 0}
    return CacheView((k, v, None, None), (*k.stride()[:3], *v.stride()[:3], 0, 0), constants)
