"""Shares of decode attention put together: by the last program to arrive, or by a kernel where they are many.

A program that attends has registers for few shares at a time, and waits for each such load: from some 16 shares on a
launch with a program for every head costs less.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forebay.kernels.gpu_support.cache_tiles import round_to, sink_weight
from forebay.kernels.gpu_support.rotation import rotated

FEW = tl.constexpr(4)  # shares that the last program to arrive takes at a time
MERGED = 16  # that the kernel does; no more than these are left to the last program


@triton.jit
def merge_shares(
    part_ptr, stat_ptr, out_at, sinks_at, share, shares, present, dtype: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, POWER: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Write rows `present` of out at out_at [R] from their shares, the first of which are `share` [R], each with the
    maximum it used. Shares of rotated rows are rotated back. Sinks at sinks_at [R] are the rows' scores with which no
    value goes."""
    DP: tl.constexpr = triton.next_power_of_2(D)
    d = tl.arange(0, DP)
    acc = tl.zeros((R, DP), tl.float32)
    total = tl.zeros((R,), tl.float32)
    top = tl.full((R,), float("-inf"), tl.float32)
    for s0 in tl.range(0, shares, FEW, num_stages=1):
        split = s0 + tl.arange(0, FEW)
        each = share[None, :] + split[:, None]
        held = (split < shares)[:, None] & present[None, :]
        # What other multiprocessors wrote is in the L2, and may be old in the L1.
        used = tl.load(stat_ptr + each * 2, mask=held, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(stat_ptr + each * 2 + 1, mask=held, other=0.0, cache_modifier=".cg")
        mask = held[:, :, None] & (d < D)[None, None, :]
        part = tl.load(part_ptr + each[:, :, None] * D + d[None, None, :], mask=mask, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(used, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(used - base[None, :])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(sums * weight, 0)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
        top = higher
    if HAS_SINKS:
        total += sink_weight(sinks_at, present, top)
    out = rotated(acc / total[:, None], POWER, POWER // 2) if POWER != 0 else acc / total[:, None]
    tl.store(out_at[:, None] + d[None, :], round_to(out, dtype), mask=present[:, None] & (d < D)[None, :])


@triton.jit
def merge_kernel(
    part_ptr, stat_ptr, start_ptr, sinks_ptr, out_ptr, ob, oh, heads, splits,
    D: tl.constexpr, DP: tl.constexpr, SHARES: tl.constexpr, POWER: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Program (sequence and head): the shares of a row, each with the maximum it used, into out; no position: zeros.

    Shares of rotated rows are rotated back.
    """
    row = tl.program_id(0)
    b = row // heads
    d = tl.arange(0, DP)
    acc = tl.zeros((DP,), tl.float32)
    total = 0.0
    top = float("-inf")
    for s0 in range(0, splits, SHARES):
        split = s0 + tl.arange(0, SHARES)
        share = row.to(tl.int64) * splits + split
        held = split < splits
        used = tl.load(stat_ptr + share * 2, mask=held, other=float("-inf"))
        sums = tl.load(stat_ptr + share * 2 + 1, mask=held, other=0.0)
        # A share without positions wrote no part.
        mask = (held & (sums != 0))[:, None] & (d < D)[None, :]
        part = tl.load(part_ptr + share[:, None] * D + d[None, :], mask=mask, other=0.0)
        higher = tl.maximum(top, tl.max(used, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(used - base)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(sums * weight, 0)
        acc = acc * shrink + tl.sum(part * weight[:, None], 0)
        top = higher
    if HAS_SINKS:
        total += sink_weight(sinks_ptr + row % heads, True, top)
    written = tl.load(start_ptr + b) >= 0
    out = tl.where(written, acc / total, 0.0)
    if POWER != 0:
        out = tl.reshape(rotated(tl.reshape(out, (1, DP)), POWER, POWER // 2), (DP,))
    at = b.to(tl.int64) * ob + (row % heads) * oh
    tl.store(out_ptr + at + d, round_to(out, out_ptr.dtype.element_ty), mask=d < D)
