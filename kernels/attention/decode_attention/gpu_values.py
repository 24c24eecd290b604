"""Decode attention over values, those of a cache or dequantized from its rows: device functions."""

from __future__ import annotations

import triton
import triton.language as tl

from forebay.kernels.gpu_support.cache_tiles import capped, dot, load_parts, multiply_keys, round_to


@triton.jit
def second_part(M: tl.constexpr, D2: tl.constexpr, DP2: tl.constexpr):
    """Sums [M, DP2] to begin with of rows' second part; a number where there is none."""
    acc = 0.0
    if D2 != 0:
        acc = tl.zeros((M, DP2), tl.float32)
    return acc


@triton.jit
def unified_share(
    q, q2, k_ptr, v_ptr, begin, end, oldest, kr, vr, scale_log2, softcap, phi,
    CAPPED: tl.constexpr, BITS: tl.constexpr, SAME: tl.constexpr, M: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D2: tl.constexpr, DP2: tl.constexpr,
):  # fmt: skip
    """(sum of exp2(x - phi) V [M, DP], that of a second part [M, DP2], sum of exp2(x - phi) [M], largest x [M]) from
    position begin on. SAME: values are the keys."""
    acc = tl.zeros((M, DP), tl.float32)
    acc2 = second_part(M, D2, DP2)
    total = tl.zeros((M, T), tl.float32)
    top = tl.full((M, T), float("-inf"), tl.float32)
    for t0 in range(begin, end, T):
        t = t0 + tl.arange(0, T)
        seen = (t >= oldest) & (t < end)
        k, k2 = load_parts(k_ptr, t, seen, kr, q.dtype, BITS, D, DP, G, GP, D2, DP2)
        s = capped(multiply_keys(q, q2, k, k2, D2) * scale_log2, softcap, CAPPED)
        s = tl.where(seen[None, :], s, float("-inf"))
        top = tl.maximum(top, s)
        p = tl.exp2(s - phi)
        total += p
        if SAME:
            v, v2 = k, k2
        else:
            v, v2 = load_parts(v_ptr, t, seen, vr, q.dtype, BITS, D, DP, G, GP, D2, DP2)
        weights = round_to(p, q.dtype)
        acc = dot(weights, v, acc)
        if D2 != 0:
            acc2 = dot(weights, v2, acc2)
    return acc, acc2, tl.sum(total, 1), tl.max(top, 1)


@triton.jit
def synchronised_share(
    q, q2, k_ptr, v_ptr, begin, end, oldest, kr, vr, scale_log2, softcap,
    CAPPED: tl.constexpr, BITS: tl.constexpr, SAME: tl.constexpr, M: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D2: tl.constexpr, DP2: tl.constexpr,
):  # fmt: skip
    """Compute like unified_share, with the largest x so far in place of phi, by the online softmax."""
    acc = tl.zeros((M, DP), tl.float32)
    acc2 = second_part(M, D2, DP2)
    total = tl.zeros((M,), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    for t0 in range(begin, end, T):
        t = t0 + tl.arange(0, T)
        seen = (t >= oldest) & (t < end)
        k, k2 = load_parts(k_ptr, t, seen, kr, q.dtype, BITS, D, DP, G, GP, D2, DP2)
        s = capped(multiply_keys(q, q2, k, k2, D2) * scale_log2, softcap, CAPPED)
        s = tl.where(seen[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        if SAME:
            v, v2 = k, k2
        else:
            v, v2 = load_parts(v_ptr, t, seen, vr, q.dtype, BITS, D, DP, G, GP, D2, DP2)
        weights = round_to(p, q.dtype)
        acc = dot(weights, v, acc * shrink[:, None])
        if D2 != 0:
            acc2 = dot(weights, v2, acc2 * shrink[:, None])
        top = higher
    return acc, acc2, total, top
