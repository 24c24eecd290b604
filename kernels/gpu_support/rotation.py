"""Hadamard rotations of rows in registers, as `kernels/kv_append_q.py` defines them: device functions.

Blocks of 2^POWER elements, POWER at most 5, are rotated in their order along D. In that order are lanes of a row in
groups (`cache_tiles`) where groups are whole blocks, or one. Elsewhere a row is rotated in D's order and then gathered.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forebay.kernels.gpu_support.cache_tiles import lane_values, round_to


@triton.jit
def rotated(x, POWER: tl.constexpr, HALVINGS: tl.constexpr):
    """fp32 x [M, W] times the Hadamard matrix of +-1 of every block along W, over 2^HALVINGS; W holds whole blocks."""
    M: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    for _ in tl.static_range(POWER):
        # Neighbours are always the pair: a stage moves its bit of the index to the front, and the last one is home.
        a, b = tl.split(tl.reshape(x, (M, W >> POWER, 1 << (POWER - 1), 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (M, W))
    return x * (1.0 / (1 << HALVINGS))


@triton.jit
def load_rotated(
    row, used, HALVINGS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    """Lanes [M, DP] in fp32 of rows at pointers [M], rotated; 0 in lanes without a value and in rows not used."""
    d, valid = lane_values(D, DP, G, GP)
    if GP == DP or G % (1 << POWER) == 0:
        x = tl.load(row[:, None] + d[None, :], mask=used[:, None] & valid[None, :], other=0.0)
        x = rotated(x.to(tl.float32), POWER, HALVINGS)
    else:
        plain = tl.arange(0, DP)
        x = tl.load(row[:, None] + plain[None, :], mask=used[:, None] & (plain < D)[None, :], other=0.0)
        x = rotated(x.to(tl.float32), POWER, HALVINGS)
        x = tl.gather(x, tl.where(valid, d, 0)[None, :] + tl.zeros(x.shape, tl.int32), 1)
        x = tl.where(valid[None, :], x, 0.0)
    return x


@triton.jit
def either(a, b):
    """One of two equal numbers."""
    return a


@triton.jit
def load_query(
    row, used, D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    """Lanes [M, DP] of queries at pointers [M], in their dtype, rotated as the keys of a cache are read."""
    if POWER == 0:
        d, valid = lane_values(D, DP, G, GP)
        q = tl.load(row[:, None] + d[None, :], mask=used[:, None] & valid[None, :], other=0.0)
    else:
        q = load_rotated(row, used, POWER // 2, D, DP, G, GP, POWER)
        # The compiler would rotate in the layout of a product's factor, and hold that in every warp's registers. It
        # does not carry layouts across a reduction: what one makes goes to shared memory, as what was loaded does.
        q = round_to(q, row.dtype.element_ty)
        q = tl.reduce(tl.join(q, q), 2, either)
    return q


@triton.jit
def rotated_values(
    x, D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    """(lanes x [M, DP] rotated back, the index along D of each column, whether it holds a value)."""
    d, valid = lane_values(D, DP, G, GP)
    if POWER != 0:
        if GP != DP and G % (1 << POWER) != 0:
            d = tl.arange(0, DP)
            valid = d < D
            x = tl.gather(x, tl.where(valid, d // G * GP + d % G, 0)[None, :] + tl.zeros(x.shape, tl.int32), 1)
        x = rotated(x, POWER, POWER // 2)
    return x, d, valid
