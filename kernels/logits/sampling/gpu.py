"""`forebay::sampling` in Triton: greedy, or temperature, top-k and top-p with a given uniform number, one launch.

One program per row. It reads the row from device memory once; the searches for the two thresholds read it again, a
row of 256 Ki logits being at most 1 MiB of L2. Each pass of a search tries seven keys, in an order of integers that is
the order of the numbers: no more than six passes where logits have 16 bits. No sort and no scratch is needed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.gpu_support.arguments import check_tensor, fail

BLOCK, WARPS = 4096, 16
MINUS_INFINITY = tl.constexpr(-2139095041)  # the key of -inf, in fp32 as all here
INFINITY = tl.constexpr(2139095040)  # the key of inf
NAN = tl.constexpr(2147483647)  # the key of every NaN: NaN is the largest, as in torch


@triton.jit
def order_key(x):
    """int32 keys whose order is that of the fp32 numbers x: zeros equal, every NaN the largest."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits >= 0, bits, bits ^ 2147483647)
    return tl.where(x != x, NAN, tl.where(x == 0.0, 0, key))


@triton.jit
def load_block(row_ptr, begin, vocabulary, BLOCK: tl.constexpr):
    """The logits from begin on in fp32, their keys without bits that their dtype lacks, and which are in the row."""
    at = begin + tl.arange(0, BLOCK)
    used = at < vocabulary
    x = tl.load(row_ptr + at, mask=used, other=-float("inf"))
    SHIFT: tl.constexpr = 16 if x.dtype.is_bf16() else (13 if x.dtype.is_fp16() else 0)
    x = x.to(tl.float32)
    return x, order_key(x) >> SHIFT, used


@triton.jit
def mass_within(row_ptr, vocabulary, low, high, top, inverse_temperature, BLOCK: tl.constexpr):
    """Sum of exp((x - top) / temperature) over logits with low <= key <= high; monotone in high, rounding included."""
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, vocabulary, BLOCK):
        x, key, used = load_block(row_ptr, begin, vocabulary, BLOCK)
        total += tl.where(used & (key >= low) & (key <= high), tl.exp((x - top) * inverse_temperature), 0.0)
    return tl.sum(total, 0)


@triton.jit
def eighth(low, high, PART: tl.constexpr):
    """So many eighths of the way from low to high, in int64: one of the seven keys between that a pass tries."""
    return low + ((high - low) * PART >> 3)


@triton.jit
def after_count(low, high, count, top_k, middle):
    """(low, high) after `count` logits were found to reach middle; they are next to each other where it is top_k."""
    low = tl.where(count >= top_k, tl.maximum(low, middle), low)
    most = tl.where(count > top_k, high, tl.where(count == top_k, middle + 1, middle))
    return low, tl.minimum(high, most)


@triton.jit
def kth_key(row_ptr, vocabulary, lowest, top_key, top_k, BLOCK: tl.constexpr):
    """The largest key that at least top_k logits reach; each pass over the row leaves an eighth of the keys."""
    low = tl.full((), lowest, tl.int64)
    high = top_key.to(tl.int64) + 1
    while high - low > 1:
        a, b, c, d = eighth(low, high, 1), eighth(low, high, 2), eighth(low, high, 3), eighth(low, high, 4)
        e, f, g = eighth(low, high, 5), eighth(low, high, 6), eighth(low, high, 7)
        none = tl.zeros((BLOCK,), tl.int32)
        ra, rb, rc, rd, re, rf, rg = none, none, none, none, none, none, none
        for begin in range(0, vocabulary, BLOCK):
            _, key, used = load_block(row_ptr, begin, vocabulary, BLOCK)
            key = tl.where(used, key, -2147483648)
            ra += (key >= a.to(tl.int32)).to(tl.int32)
            rb += (key >= b.to(tl.int32)).to(tl.int32)
            rc += (key >= c.to(tl.int32)).to(tl.int32)
            rd += (key >= d.to(tl.int32)).to(tl.int32)
            re += (key >= e.to(tl.int32)).to(tl.int32)
            rf += (key >= f.to(tl.int32)).to(tl.int32)
            rg += (key >= g.to(tl.int32)).to(tl.int32)
        low, high = after_count(low, high, tl.sum(ra, 0), top_k, a)
        low, high = after_count(low, high, tl.sum(rb, 0), top_k, b)
        low, high = after_count(low, high, tl.sum(rc, 0), top_k, c)
        low, high = after_count(low, high, tl.sum(rd, 0), top_k, d)
        low, high = after_count(low, high, tl.sum(re, 0), top_k, e)
        low, high = after_count(low, high, tl.sum(rf, 0), top_k, f)
        low, high = after_count(low, high, tl.sum(rg, 0), top_k, g)
    return low


@triton.jit
def after_mass(low, high, mass, dropped, middle):
    """(low, high) after `mass` was found up to middle."""
    return (tl.where(mass > dropped, low, tl.maximum(low, middle)),
            tl.where(mass > dropped, tl.minimum(high, middle), high))


@triton.jit
def nucleus_key(row_ptr, vocabulary, low_key, top_key, top, inverse_temperature, dropped, BLOCK: tl.constexpr):
    """The smallest key at which the mass from low_key up to it is above `dropped`; at most top_key. Each pass over the
    row leaves an eighth of the keys."""
    low = low_key - 1
    high = top_key.to(tl.int64)
    while high - low > 1:
        a, b, c, d = eighth(low, high, 1), eighth(low, high, 2), eighth(low, high, 3), eighth(low, high, 4)
        e, f, g = eighth(low, high, 5), eighth(low, high, 6), eighth(low, high, 7)
        none = tl.zeros((BLOCK,), tl.float32)
        ma, mb, mc, md, me, mf, mg = none, none, none, none, none, none, none
        for begin in range(0, vocabulary, BLOCK):
            x, key, used = load_block(row_ptr, begin, vocabulary, BLOCK)
            mass = tl.where(used & (key >= low_key), tl.exp((x - top) * inverse_temperature), 0.0)
            ma += tl.where(key <= a.to(tl.int32), mass, 0.0)
            mb += tl.where(key <= b.to(tl.int32), mass, 0.0)
            mc += tl.where(key <= c.to(tl.int32), mass, 0.0)
            md += tl.where(key <= d.to(tl.int32), mass, 0.0)
            me += tl.where(key <= e.to(tl.int32), mass, 0.0)
            mf += tl.where(key <= f.to(tl.int32), mass, 0.0)
            mg += tl.where(key <= g.to(tl.int32), mass, 0.0)
        low, high = after_mass(low, high, tl.sum(ma, 0), dropped, a)
        low, high = after_mass(low, high, tl.sum(mb, 0), dropped, b)
        low, high = after_mass(low, high, tl.sum(mc, 0), dropped, c)
        low, high = after_mass(low, high, tl.sum(md, 0), dropped, d)
        low, high = after_mass(low, high, tl.sum(me, 0), dropped, e)
        low, high = after_mass(low, high, tl.sum(mf, 0), dropped, f)
        low, high = after_mass(low, high, tl.sum(mg, 0), dropped, g)
    return high


@triton.jit
def sampling_kernel(
    logits_ptr, uniforms_ptr, out_ptr, vocabulary, stride, inverse_temperature, top_k, dropped_share,
    SAMPLE: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row): the first largest logit, or the first kept one whose cumulative mass exceeds uniform * total."""
    DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
    SHIFT: tl.constexpr = 16 if DTYPE.is_bf16() else (13 if DTYPE.is_fp16() else 0)
    LOWEST: tl.constexpr = MINUS_INFINITY >> SHIFT
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    best_key = tl.full((BLOCK,), -2147483648, tl.int32)
    best_at = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, vocabulary, BLOCK):
        _, key, used = load_block(row_ptr, begin, vocabulary, BLOCK)
        better = used & (key > best_key)
        best_at = tl.where(better, begin + tl.arange(0, BLOCK), best_at)
        best_key = tl.where(better, key, best_key)
    top_key = tl.max(best_key, 0)
    token = tl.min(tl.where(best_key == top_key, best_at, 2147483647), 0)
    # softmax over a row that holds NaN or inf, or nothing but -inf, is NaN: such a row keeps the largest logit
    if SAMPLE and (top_key > LOWEST) and (top_key < (INFINITY >> SHIFT)):
        top = tl.load(row_ptr + token).to(tl.float32)
        low_key = tl.full((), LOWEST, tl.int64)
        if TOP_K:
            low_key = kth_key(row_ptr, vocabulary, LOWEST, top_key, top_k, BLOCK)
        if TOP_P:
            kept = mass_within(row_ptr, vocabulary, low_key, top_key, top, inverse_temperature, BLOCK)
            low_key = nucleus_key(
                row_ptr, vocabulary, low_key, top_key, top, inverse_temperature, kept * dropped_share, BLOCK
            )
        total = mass_within(row_ptr, vocabulary, low_key, top_key, top, inverse_temperature, BLOCK)
        target = tl.load(uniforms_ptr + row) * total
        passed = total * 0.0
        chosen = tl.full((), 2147483647, tl.int32)
        last = token
        for begin in range(0, vocabulary, BLOCK):
            x, key, used = load_block(row_ptr, begin, vocabulary, BLOCK)
            kept_here = used & (key >= low_key) & (x > -float("inf"))
            mass = tl.where(kept_here, tl.exp((x - top) * inverse_temperature), 0.0)
            at = begin + tl.arange(0, BLOCK)
            reached = kept_here & (passed + tl.cumsum(mass, 0) > target)
            chosen = tl.minimum(chosen, tl.min(tl.where(reached, at, 2147483647), 0))
            last = tl.maximum(last, tl.max(tl.where(kept_here & (mass > 0.0), at, 0), 0))
            passed += tl.sum(mass, 0)
        # rounding can leave the cumulative mass below a target next to the total
        token = tl.minimum(chosen, last)
    tl.store(out_ptr + row, token.to(tl.int64))


def check(
    logits: Tensor, uniforms: Tensor | None, temperature: float, top_k: int, top_p: float, out: Tensor
) -> None:
    """ValueError names the argument whose dtype, device, shape, stride or value is wrong."""
    op = "sampling"
    check_tensor(op, "logits", logits)
    if logits.dim() != 2 or logits.shape[1] == 0:
        fail(op, "logits", f"must be [B, V] with V > 0, got shape {tuple(logits.shape)}")
    batch = logits.shape[0]
    if uniforms is not None:
        check_tensor(op, "uniforms", uniforms, device=logits.device, dtype=torch.float32, shape=(batch,))
        for value, name, right in ((temperature, "temperature", temperature > 0), (top_k, "top_k", top_k >= 0),
                                   (top_p, "top_p", 0 < top_p <= 1)):  # fmt: skip
            if not right:
                fail(op, name, f"is out of range: {value}")
    check_tensor(op, "out", out, device=logits.device, dtype=torch.int64, shape=(batch,))


def sampling(
    logits: Tensor, uniforms: Tensor | None, temperature: float, top_k: int, top_p: float, out: Tensor
) -> None:
    """Fill out [B] int64 from logits [B, V] and uniforms [B] fp32 in [0, 1), or greedily where uniforms is None.

    Deterministic, without a host synchronisation. The rules are those of `forebay.kernels.sampling`. ValueError names
    the argument that is wrong, before the launch.
    """
    check(logits, uniforms, temperature, top_k, top_p, out)
    batch, vocabulary = logits.shape
    if batch == 0:
        return
    sampling_kernel[(batch,)](
        logits, uniforms, out, vocabulary, logits.stride(0), 1.0 / temperature, top_k, 1.0 - top_p,
        SAMPLE=uniforms is not None, TOP_K=0 < top_k < vocabulary, TOP_P=top_p < 1, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
