"""Decode attention over values, those of a cache or dequantized from its rows: device functions."""

from __future__ import annotations

import triton
import triton.language as tl

from forebay.kernels.gpu_support.cache_tiles import dot, load_tile, round_to, score_log2


@triton.jit
def unified_share(
    q, k_ptr, v_ptr, begin, end, oldest, kr, vr, scale_log2, softcap, phi,
    CAPPED: tl.constexpr, BITS: tl.constexpr, M: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """(sum of exp2(x - phi) V [M, DP], sum of exp2(x - phi) [M], largest x [M]) from position begin on."""
    acc = tl.zeros((M, DP), tl.float32)
    total = tl.zeros((M, T), tl.float32)
    top = tl.full((M, T), float("-inf"), tl.float32)
    for t0 in range(begin, end, T):
        t = t0 + tl.arange(0, T)
        seen = (t >= oldest) & (t < end)
        k = load_tile(k_ptr, t, seen, kr, q.dtype, BITS, D, DP, G, GP)
        s = tl.where(seen[None, :], score_log2(q, k, scale_log2, softcap, CAPPED), float("-inf"))
        top = tl.maximum(top, s)
        p = tl.exp2(s - phi)
        total += p
        v = load_tile(v_ptr, t, seen, vr, q.dtype, BITS, D, DP, G, GP)
        acc = dot(round_to(p, q.dtype), v, acc)
    return acc, tl.sum(total, 1), tl.max(top, 1)


@triton.jit
def synchronised_share(
    q, k_ptr, v_ptr, begin, end, oldest, kr, vr, scale_log2, softcap,
    CAPPED: tl.constexpr, BITS: tl.constexpr, M: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Compute like unified_share, with the largest x so far in place of phi, by the online softmax."""
    acc = tl.zeros((M, DP), tl.float32)
    total = tl.zeros((M,), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    for t0 in range(begin, end, T):
        t = t0 + tl.arange(0, T)
        seen = (t >= oldest) & (t < end)
        k = load_tile(k_ptr, t, seen, kr, q.dtype, BITS, D, DP, G, GP)
        s = tl.where(seen[None, :], score_log2(q, k, scale_log2, softcap, CAPPED), float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        v = load_tile(v_ptr, t, seen, vr, q.dtype, BITS, D, DP, G, GP)
        acc = dot(round_to(p, q.dtype), v, acc * shrink[:, None])
        top = higher
    return acc, total, top
