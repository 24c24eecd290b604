"""Tiles of packed rows (`packing`) and of activations, plain or packed, for products with both: device functions.

Packed rows are read as 32-bit words, codes, scales and lows alike: loads of less than 32 bits are not pipelined.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forebay.kernels.gpu_support.paged import dot
from forebay.kernels.gpu_support.unpacking import code_of, spread, weights_of
from forebay.kernels.products.linear_q.gpu import load_halves


@triton.jit
def load_twice(rows, index, DTYPE: tl.constexpr):
    """Value [B, 1] of DTYPE at half `index` of rows of words, in two columns: the compiler moves all weights of a tile
    through shared memory where one is spread over all columns."""
    bits = tl.load(rows + index // 2) >> (index % 2 * 16).to(tl.uint32)
    return tl.reshape(tl.interleave(bits, bits), (rows.shape[0], 2)).to(tl.uint16).to(DTYPE, bitcast=True)


@triton.jit
def load_packed(
    rows, below, k0, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Elements k0 .. k0 + BK - 1 of packed rows [B, 1] that begin `below` words behind `rows`, of `groups` groups.

    Words [B, BK * BITS / 32], and scales and lows of HALF [B, groups of the tile], or twice where it has but one;
    behind a row's groups they are 0.
    """
    GROUPS: tl.constexpr = BK // GROUP if BK > GROUP else 1
    word = tl.arange(0, BK * BITS // 32)[None, :]
    at = rows + k0 * BITS // 32
    if WHOLE:
        w = tl.load(at + (below + word))
    else:
        w = tl.load(at + (below + word), mask=word < (groups * GROUP - k0) * BITS // 32, other=0)
    first = k0 // GROUP
    scale_at = groups * (GROUP * BITS // 16) + first
    if GROUPS == 1:
        scale, low = load_twice(rows + below, scale_at, HALF), load_twice(rows + below, scale_at + groups, HALF)
    else:
        scale = load_halves(rows, below, scale_at, groups - first, GROUPS, WHOLE, HALF)
        low = load_halves(rows, below, scale_at + groups, groups - first, GROUPS, WHOLE, HALF)
    return w, scale, low


@triton.jit
def pair_of(w, scale, low, PART: tl.constexpr, BITS: tl.constexpr):
    """Elements PART and PART + 16 / BITS of each word, in fp32."""
    return tl.join(code_of(w, PART, 0, BITS) * scale + low, code_of(w, PART, 1, BITS) * scale + low)


@triton.jit
def load_activation(
    rows, below, k0, features,
    BITS: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Features k0 .. k0 + BK - 1 in fp32 [BM, BK], 0 behind the last; rows begin `below` [BM, 1] behind `rows`."""
    k = tl.arange(0, BK)[None, :]
    if BITS == 0:
        if WHOLE:
            x = tl.load(rows + k0 + (below + k))
        else:
            x = tl.load(rows + k0 + (below + k), mask=k < features - k0, other=0.0)
        x = x.to(tl.float32)
    else:
        groups = tl.cdiv(features, GROUP)
        w, scale, low = load_packed(rows, below, k0, groups, BITS, GROUP, BK, WHOLE, tl.float16)
        scale = spread(scale, w.shape[1] // scale.shape[1], False, tl.float32)
        low = spread(low, w.shape[1] // low.shape[1], False, tl.float32)
        x0, x1 = pair_of(w, scale, low, 0, BITS), pair_of(w, scale, low, 1, BITS)
        if BITS == 4:
            # Element 4 h + 2 a + b of a word; part 2 a + b holds h.
            x0 = tl.join(x0, pair_of(w, scale, low, 2, BITS))
            x1 = tl.join(x1, pair_of(w, scale, low, 3, BITS))
        x = tl.reshape(tl.join(x0, x1), (w.shape[0], BK))
        if not WHOLE:
            x = tl.where(k < features - k0, x, 0.0)
    return x


@triton.jit
def add_packed(
    sums, rows, below, k0, groups, factors,
    BITS: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr, PTX: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """sums [DP, BM] and the product of packed rows with the columns of x that `columns_of` made."""
    w, scale, low = load_packed(rows, below, k0, groups, BITS, GROUP, BK, WHOLE, dtype)
    scale = spread(scale, w.shape[1] // scale.shape[1], PTX, dtype)
    low = spread(low, w.shape[1] // low.shape[1], PTX, dtype)
    for part in tl.static_range(16 // BITS):
        sums = dot(weights_of(w, scale, low, part, BITS, PTX, dtype), factors[part], sums)
    return sums
