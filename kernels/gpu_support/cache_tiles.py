"""Tiles of K and V from a cache, dequantized in registers: device functions and their arguments.

A tile is [T, DP]: T positions, and DP lanes of one head. A row of D values in groups of G is spread over lanes so that
each group begins at a multiple of GP, the power of two at or above G; lanes without a value hold anything finite or
what poisons the row anyway, and must meet zeros. Native values are one group of D. Packed rows (`kv_append_q`) are
rotated; `rotation` has what rotates queries and results. Device functions that take codes as they are, without tiles
of values, are in `cache_codes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.attention.decode_attention.decode_shares import TYPICAL_LANES, lane_count, lane_width, most_dim
from forebay.kernels.gpu_support.arguments import fail
from forebay.kernels.products.linear.selection import AMD

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
def unpack_ending(words, group, held, CODES: tl.constexpr, GROUPS: tl.constexpr):
    """(scale, low) [T, GROUPS_P] in fp32 of rows at pointers [T, 1]. After CODES halves follow GROUPS
    scales, then the lows.

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
def load_tile(
    ptr, t, seen, stride_row,
    dtype: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    BEFORE: tl.constexpr = 0, AFTER: tl.constexpr = 0,
):  # fmt: skip
    """[T, DP] of dtype: rows of positions t; what is not seen is 0. The stride is in elements.

    Packed rows have BEFORE values in whole groups before these D, and AFTER values after them.
    """
    row = t.to(tl.int64) * stride_row
    if BITS == 0:
        d, valid = lane_values(D, DP, G, GP)
        at = ptr + row[:, None] + d[None, :]
        if seen is None and D == DP:
            x = tl.load(at)
        elif seen is None:
            x = tl.load(at, mask=valid[None, :], other=0.0)
        elif D == DP:
            x = tl.load(at, mask=seen[:, None], other=0.0)
        else:
            x = tl.load(at, mask=seen[:, None] & valid[None, :], other=0.0)
    else:
        GROUPS: tl.constexpr = (D + G - 1) // G
        GROUPS_P: tl.constexpr = DP // GP
        ALL: tl.constexpr = (BEFORE + D + AFTER + G - 1) // G
        group = tl.arange(0, GROUPS_P)[None, :]
        held = seen[:, None] & (group < GROUPS)
        words = (ptr + row).to(tl.pointer_type(tl.int32))[:, None]
        scale, low = unpack_ending(words, group + BEFORE // G, held, ALL * G * BITS // 16, ALL)
        # Bytes of a row: lanes of codes (8 bits), or of pairs of codes (4 bits), whole groups.
        PER_BYTE: tl.constexpr = 8 // BITS
        at, valid = lane_values(GROUPS * G // PER_BYTE, DP // PER_BYTE, G // PER_BYTE, GP // PER_BYTE)
        mask = seen[:, None]
        if DP != GROUPS * G:
            mask = mask & valid[None, :]
        code = tl.load(ptr + row[:, None] + (at + BEFORE * BITS // 8)[None, :], mask=mask, other=0)
        if BITS == 4:
            code = tl.interleave(code & 15, code >> 4)
        x = tl.reshape(code.to(tl.float32), (code.shape[0], GROUPS_P, GP))
        x = x * scale[:, :, None] + low[:, :, None]
        x = round_to(tl.reshape(x, (code.shape[0], DP)), dtype)
    return x


@triton.jit
def load_parts(
    ptr, t, seen, stride_row, dtype: tl.constexpr, BITS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D2: tl.constexpr, DP2: tl.constexpr,
):  # fmt: skip
    """load_tile of the first D of rows' values, and of the D2 after them; the first again where there are none."""
    x = load_tile(ptr, t, seen, stride_row, dtype, BITS, D, DP, G, GP)
    x2 = x
    if D2 != 0:
        x2 = load_tile(ptr + D, t, seen, stride_row, dtype, 0, D2, DP2, D2, DP2)
    return x, x2


@triton.jit
def multiply_keys(q, q2, k, k2, D2: tl.constexpr):
    """q [M, D] times keys [T, D] in fp32, of rows in one part, or in two."""
    s = dot(q, tl.trans(k), tl.zeros((q.shape[0], k.shape[0]), tl.float32))
    if D2 != 0:
        s = dot(q2, tl.trans(k2), s)
    return s


@triton.jit
def capped(s, softcap, CAPPED: tl.constexpr):
    """Scores times log2(e), from scores times scale * log2(e), or where capped times scale / softcap."""
    if CAPPED:  # tanh(x) = 1 - 2 / (exp(2 x) + 1), in which infinities come out right; softcap is times log2(e)
        s = softcap * (1.0 - 2.0 / (tl.exp2(s * 2.8853900817779268) + 1.0))
    return s


@triton.jit
def sink_weight(sinks_at, present, top):
    """exp of the score with which no value goes, over the largest score `top`, which is times log2(e)."""
    sink = tl.load(sinks_at, mask=present, other=float("-inf")).to(tl.float32)
    return tl.exp2(sink * 1.4426950408889634 - top)


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """(scale_log2, softcap): scale * log2(e), or scale / softcap where scores are capped, and the cap times log2(e)."""
    return (scale / softcap, softcap * LOG2E) if softcap > 0 else (scale * LOG2E, 0.0)


@dataclass(frozen=True)
class CacheView:
    """A kernel's view of K and V: pointers, strides of sequence, head and row, and constants."""

    pointers: tuple[Tensor, Tensor]  # k, v
    strides: tuple[int, ...]  # of k: sequence, head, row; of v
    constants: dict[str, Any]
    unit: int = 1  # bytes that all strides of packed rows are multiples of
    power: int = 0  # rows are rotated by Hadamard blocks of 2^power elements


class AttendedCache(NamedTuple):
    """The cache that a launch attends over: `kv_heads` heads of at most `capacity` positions of position_nbytes each.

    The first query of sequence b stands at position start[b].
    """

    view: CacheView
    kv_heads: int
    capacity: int
    position_nbytes: int
    start: Tensor  # int64 [B]


def lanes(head_dim: int, group: int) -> dict[str, int]:
    """The constants D, DP, G and GP."""
    return {"D": head_dim, "DP": lane_count(head_dim, group), "G": group, "GP": lane_width(head_dim, group)}


def row_parts(view: CacheView, least: int, amd: bool = AMD) -> dict[str, int]:
    """The constants D, DP, G and GP of a row, or of its first part, and D2 and DP2 of its second, of `least` lanes or
    more. Native rows above 64 values are two parts where the powers of two that hold these are less than the one that
    holds the row: 96 is 64 and 32, and a latent row of 576 is 512 and 64.

    On AMD no gain is known up to 256: 96 would take more matrix instructions than 128."""
    dim = view.constants["D"]
    first = 1 << (dim.bit_length() - 1)
    lanes = max(least, triton.next_power_of_2(dim - first))
    if view.constants["BITS"] or first < 64 or first + lanes >= view.constants["DP"] or (amd and dim <= 256):
        return {name: view.constants[name] for name in ("D", "DP", "G", "GP")} | {"D2": 0, "DP2": 0}
    return dict.fromkeys(("D", "DP", "G", "GP"), first) | {"D2": dim - first, "DP2": lanes}


def same_rows(view: CacheView) -> bool:
    """Tell whether keys and values of more than 256 numbers are the same bytes, as latents: kernels load them once."""
    k, v = view.pointers
    same = k.data_ptr() == v.data_ptr() and view.strides[:3] == view.strides[3:]
    return same and view.constants["D"] > TYPICAL_LANES


def check_head_dim(op: str, q: Tensor) -> None:
    """The kernels have registers for q's rows."""
    most = most_dim(q.dtype.itemsize)
    if not 1 <= q.shape[-1] <= most:
        fail(op, "q", f"must have a head_dim of 1 .. {most} in {q.dtype}, got {q.shape[-1]}")


def contiguous_view(k: Tensor, v: Tensor) -> CacheView:
    """K and V that are tensors [B, Hkv, L, D] of any strides but D's."""
    constants = lanes(k.shape[3], k.shape[3]) | {"BITS": 0}
    return CacheView((k, v), (*k.stride()[:3], *v.stride()[:3]), constants)
