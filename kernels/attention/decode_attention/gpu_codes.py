"""Decode attention over quantized rows, whose codes meet the tensor cores as they are: device functions.

A warp takes 16 positions of a tile and all lanes (`cache_codes`); nothing crosses warps before the share ends.

Scores are sums over groups of scale * (q . codes) + low * sum(q). Groups are rows of the product: a row has a query
head in the lanes of one group and zeros in the others, so that 16 rows which few query heads would leave empty hold the
groups. What the codes stand under is taken off where the sum begins. bf16 queries are brought to 1 .. 2 by a power of
two per row, since codes are fp16, which has its 11 bits only there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forebay.kernels.gpu_support.cache_codes import (
    HALVES,
    PAIRS,
    PLAIN,
    key_codes,
    key_factors,
    key_order,
    values_of_codes,
)
from forebay.kernels.gpu_support.cache_tiles import capped, dot, round_to, unpack_ending


@triton.jit
def query_part(q, PART: tl.constexpr, BITS: tl.constexpr):
    """[M, 2 W]: the lanes of q [M, DP] that meet key_codes of a part, in the order of key_order."""
    M: tl.constexpr = q.shape[0]
    W: tl.constexpr = q.shape[1] * BITS // 32
    if BITS == 4:
        even, odd = tl.split(tl.reshape(q, (M, W, 2, 2, 2)))
        if PART % 2 == 0:
            first, second = tl.split(even)
        else:
            first, second = tl.split(odd)
        x = first if PART < 2 else second
    else:
        first, second = tl.split(tl.reshape(q, (M, W, 2, 2)))
        x = first if PART == 0 else second
    return tl.reshape(tl.permute(tl.reshape(x, (M, 4, W // 8, 2, 2)), (0, 2, 1, 3, 4)), (M, 2 * W))


@triton.jit
def prepare_query(q, H: tl.constexpr, GP: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr):
    """(fp16 lanes [M, DP], what their sums begin with [M], their sums [M], a power of two [H] to multiply scores by).

    Row g * H + h of q [M, DP] is query head h; only lanes of one group are kept, in the order of even_first.
    """
    M: tl.constexpr = q.shape[0]
    DP: tl.constexpr = q.shape[1]
    lane = tl.arange(0, DP)
    group = tl.arange(0, M) // H
    if M > H:
        group = group // (M // H // 2) + group % (M // H // 2) * 2
    kept = (lane // GP)[None, :] == group[:, None]
    x = q.to(tl.float32)
    power = tl.full((M,), 1.0, tl.float32)
    if q.dtype == tl.bfloat16:
        exponent = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) & 0x7F800000
        exponent = tl.minimum(exponent, 253 << 23)
        power = exponent.to(tl.float32, bitcast=True)
        x = x * ((254 << 23) - exponent).to(tl.float32, bitcast=True)[:, None]
    x = tl.where(kept, x, 0.0).to(tl.float16)
    wide = x.to(tl.float32)
    sums = tl.sum(wide, 1)
    begin = -1024.0 * sums
    if not PTX:
        begin = tl.zeros((M,), tl.float32)
    elif BITS == 4:
        begin += 960.0 * tl.sum(tl.where((lane % 2 == 1)[None, :], wide, 0.0), 1)
    return x, begin, sums, tl.max(tl.reshape(power, (M // H, H)), 0)


@triton.constexpr_function
def kind_of(D, DP, G, GP):
    """Return how load_codes finds scales and lows: PAIRS, HALVES or PLAIN."""
    groups = (D + G - 1) // G
    if groups == 1:
        return PAIRS.value
    return HALVES.value if groups % 2 == 0 and groups == DP // GP else PLAIN.value


@triton.jit
def load_codes(
    ptr, t0, inside, seen, stride_row, BITS: tl.constexpr, WARPS: tl.constexpr, UNIT: tl.constexpr, KIND: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """(words [WARPS, 16, W], scales, lows) of rows t0 + `inside`; what is not seen is 0.

    By KIND scales and lows are fp32 [WARPS, 16, groups] (PLAIN), both the words of the only pair (PAIRS), or words of
    two groups each [WARPS, 16, groups / 2] (HALVES).
    """
    GROUPS: tl.constexpr = (D + G - 1) // G
    GROUPS_P: tl.constexpr = DP // GP
    W: tl.constexpr = DP * BITS // 32
    T: tl.constexpr = inside.shape[0]
    GROUP_WORDS: tl.constexpr = G * BITS // 32
    GROUP_WORDS_P: tl.constexpr = GP * BITS // 32
    ENDING: tl.constexpr = GROUPS * GROUP_WORDS
    row_words = stride_row // UNIT * (UNIT // 4)
    first = t0 * row_words.to(tl.int64)
    row = (first + inside * row_words)[:, None]
    word_ptr = ptr.to(tl.pointer_type(tl.int32)) + row
    group = tl.arange(0, GROUPS_P)[None, :]
    held = seen[:, None] & (group < GROUPS)
    if KIND == HALVES:
        both = tl.load(word_ptr + (ENDING + group), mask=seen[:, None], other=0)
        scale, low = tl.split(tl.permute(tl.reshape(both, (T, 2, GROUPS // 2)), (0, 2, 1)))
    elif KIND == PAIRS:
        scale = tl.load(word_ptr + ENDING, mask=seen[:, None], other=0)
        low = scale
    else:
        scale, low = unpack_ending(word_ptr, group, held, 2 * ENDING, GROUPS)
    at = tl.arange(0, W)
    mask = seen[:, None]
    if GROUP_WORDS != GROUP_WORDS_P or GROUPS != GROUPS_P:
        place = at % GROUP_WORDS_P
        at = at // GROUP_WORDS_P * GROUP_WORDS + place
        mask = mask & ((place < GROUP_WORDS) & (at < ENDING))[None, :]
    w = tl.load(word_ptr + at[None, :], mask=mask, other=0).to(tl.uint32, bitcast=True)
    w = tl.reshape(w, (WARPS, T // WARPS, W))
    shape: tl.constexpr = (WARPS, T // WARPS, scale.shape[1])
    return w, tl.reshape(scale, shape), tl.reshape(low, shape)


@triton.jit
def add_scores(s, q, w, PART: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr):
    """s [B, M, T] plus the product of a part of q [M, DP] with its codes."""
    k = key_codes(w, PART, BITS, PTX)
    part = query_part(q, PART, BITS)
    many = tl.broadcast_to(part[None, :, :], (w.shape[0], part.shape[0], part.shape[1]))
    return dot(many, tl.permute(k, (0, 2, 1)), s)


@triton.jit
def scores_of_codes(
    q, begin, sums, w, scale, low, H: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """[B, H, T] q . k of words w [B, T, W], of what prepare_query made."""
    B: tl.constexpr = w.shape[0]
    T: tl.constexpr = w.shape[1]
    M: tl.constexpr = q.shape[0]
    s = tl.broadcast_to(begin[None, :, None], (B, M, T))
    w = key_order(w)
    for part in tl.static_range(16 // BITS):
        s = add_scores(s, q, w, part, BITS, PTX)
    scale, low = key_factors(scale, low, KIND)
    s = tl.reshape(s, (B, M // H, H, T)) * scale + tl.reshape(sums, (1, M // H, H, 1)) * low
    return tl.sum(s, 1)


@triton.jit
def for_product(p, M: tl.constexpr, DTYPE: tl.constexpr):
    """p [B, H, 16] of DTYPE as [B, 16, M] in value_order, repeated to M columns."""
    B: tl.constexpr = p.shape[0]
    H: tl.constexpr = p.shape[1]
    p = tl.permute(tl.reshape(round_to(p, DTYPE), (B, H, 2, 4, 2)), (0, 1, 3, 2, 4))
    p = tl.broadcast_to(tl.reshape(p, (B, 1, H, 16)), (B, M // H, H, 16))
    return tl.permute(tl.reshape(p, (B, M, 16)), (0, 2, 1))


@triton.jit
def lanes_in_order(x, BITS: tl.constexpr):
    """[M, DP] in the order of lanes from columns as values_of_codes has them."""
    M: tl.constexpr = x.shape[0]
    DP: tl.constexpr = x.shape[1]
    PER_WORD: tl.constexpr = 32 // BITS
    x = tl.permute(tl.reshape(x, (M, PER_WORD, DP // PER_WORD // 8, 8)), (0, 3, 2, 1))
    return tl.reshape(x, (M, DP))


@triton.jit
def repeated(x, R: tl.constexpr):
    """[B, R]: x [B, H] R / H times in turn."""
    B: tl.constexpr = x.shape[0]
    H: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, None, :], (B, R // H, H)), (B, R))


@triton.jit
def is_seen(t, oldest, end):
    """oldest <= t < end, for t >= 0, by one comparison."""
    return (t - oldest).to(tl.uint32) < (end - oldest).to(tl.uint32)


@triton.jit
def score_positions(WARPS: tl.constexpr):
    """Return which position of a tile each score is of, [WARPS, 1, 16]."""
    n = tl.arange(0, 16)
    return (tl.arange(0, WARPS) * 16)[:, None, None] + (n // 8 * 8 + n % 2 * 4 + n // 2 % 4)[None, None, :]


@triton.jit
def unified_codes(
    q, k_ptr, v_ptr, begin, end, oldest, kr, vr, scale_log2, softcap, phi,
    CAPPED: tl.constexpr, BITS: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, UNIT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """(sum of exp2(x - phi) V [R, DP], sum of exp2(x - phi) [R], largest x [R]) from position begin on.

    R is H, or 8 where that is more: rows of the query heads, in turn.
    """
    WARPS: tl.constexpr = T // 16
    R: tl.constexpr = 8 if H < 8 else H
    KIND: tl.constexpr = kind_of(D, DP, G, GP)
    codes_q, start, sums, power = prepare_query(q, H, GP, BITS, PTX)
    factor = (power * scale_log2)[None, :, None]
    acc = tl.zeros((WARPS, DP, R), tl.float32)
    total = tl.zeros((WARPS, H, 16), tl.float32)
    top = tl.full((WARPS, H, 16), float("-inf"), tl.float32)
    column = score_positions(WARPS)
    inside = tl.arange(0, T)
    for t0 in range(begin, end, T):
        there = is_seen(t0 + inside, oldest, end)
        w, scale, low = load_codes(k_ptr, t0, inside, there, kr, BITS, WARPS, UNIT, KIND, D, DP, G, GP)
        s = scores_of_codes(codes_q, start, sums, w, scale, low, H, BITS, KIND, PTX)
        s = capped(s * factor, softcap, CAPPED)
        s = tl.where(is_seen(t0 + column, oldest, end), s, float("-inf"))
        top = tl.maximum(top, s)
        p = tl.exp2(s - phi)
        total += p
        w, scale, low = load_codes(v_ptr, t0, inside, there, vr, BITS, WARPS, UNIT, KIND, D, DP, G, GP)
        v = values_of_codes(w, scale, low, BITS, KIND, q.dtype, PTX)
        acc = dot(tl.permute(v, (0, 2, 1)), for_product(p, R, q.dtype), acc)
    total, top = tl.sum(tl.sum(total, 2), 0), tl.max(tl.max(top, 2), 0)
    total, top = repeated(total[None, :], R), repeated(top[None, :], R)
    return lanes_in_order(tl.trans(tl.sum(acc, 0)), BITS), tl.reshape(total, (R,)), tl.reshape(top, (R,))


@triton.jit
def synchronised_codes(
    q, k_ptr, v_ptr, begin, end, oldest, kr, vr, scale_log2, softcap,
    CAPPED: tl.constexpr, BITS: tl.constexpr, H: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, UNIT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute like unified_codes, with the largest x so far of each warp in place of phi, by the online softmax."""
    WARPS: tl.constexpr = T // 16
    R: tl.constexpr = 8 if H < 8 else H
    KIND: tl.constexpr = kind_of(D, DP, G, GP)
    codes_q, start, sums, power = prepare_query(q, H, GP, BITS, PTX)
    factor = (power * scale_log2)[None, :, None]
    acc = tl.zeros((WARPS, DP, R), tl.float32)
    total = tl.zeros((WARPS, H, 16), tl.float32)
    top = tl.full((WARPS, H), float("-inf"), tl.float32)
    column = score_positions(WARPS)
    inside = tl.arange(0, T)
    for t0 in range(begin, end, T):
        there = is_seen(t0 + inside, oldest, end)
        w, scale, low = load_codes(k_ptr, t0, inside, there, kr, BITS, WARPS, UNIT, KIND, D, DP, G, GP)
        s = scores_of_codes(codes_q, start, sums, w, scale, low, H, BITS, KIND, PTX)
        s = capped(s * factor, softcap, CAPPED)
        s = tl.where(is_seen(t0 + column, oldest, end), s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 2))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - base[:, :, None])
        shrink = tl.exp2(top - base)
        total = total * shrink[:, :, None] + p
        w, scale, low = load_codes(v_ptr, t0, inside, there, vr, BITS, WARPS, UNIT, KIND, D, DP, G, GP)
        v = values_of_codes(w, scale, low, BITS, KIND, q.dtype, PTX)
        acc = dot(tl.permute(v, (0, 2, 1)), for_product(p, R, q.dtype), acc * repeated(shrink, R)[:, None, :])
        top = higher
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    shrink = tl.exp2(top - base[None, :])
    total = tl.sum(tl.sum(total, 2) * shrink, 0)
    acc = tl.sum(acc * repeated(shrink, R)[:, None, :], 0)
    total, highest = repeated(total[None, :], R), repeated(highest[None, :], R)
    return lanes_in_order(tl.trans(acc), BITS), tl.reshape(total, (R,)), tl.reshape(highest, (R,))
