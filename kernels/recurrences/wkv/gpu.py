"""`forebay::wkv` in Triton: a program walks some channels' sums through the tokens of a sequence."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.gpu_support.arguments import check_tensor
from forebay.kernels.gpu_support.launches import bound, kernel_call
from forebay.kernels.recurrences.wkv.reference import EMPTY, check_arguments

OP = "wkv"
CHANNELS = 64  # of a program


@triton.jit
def with_token(above, below, exponent, key, value):
    """The sums with a token of the exponent `key` added, by the larger of both exponents."""
    most = tl.maximum(exponent, key)
    old, fresh = tl.exp(exponent - most), tl.exp(key - most)
    return old * above + fresh * value, old * below + fresh, most


@triton.jit
def wkv_kernel(
    k_ptr, v_ptr, decay_ptr, bonus_ptr, state_ptr, start_ptr, count_ptr, out_ptr, tokens, channels,
    kb, ks, vb, vs, ob, os, EMPTY: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Program (tile of channels, sequence)."""
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * C + tl.arange(0, C)
    there = channel < channels
    count = tl.minimum(tl.maximum(tl.load(count_ptr + row), 0), tokens).to(tl.int32)
    goes_on = there & (tl.load(start_ptr + row) != 0)
    decay = tl.load(decay_ptr + channel, mask=there, other=0.0)
    bonus = tl.load(bonus_ptr + channel, mask=there, other=0.0)
    state_at = state_ptr + row * 3 * channels + channel
    above = tl.load(state_at, mask=goes_on, other=0.0)
    below = tl.load(state_at + channels, mask=goes_on, other=0.0)
    exponent = tl.load(state_at + 2 * channels, mask=goes_on, other=EMPTY)
    k_at, v_at, out_at = k_ptr + row * kb + channel, v_ptr + row * vb + channel, out_ptr + row * ob + channel
    for _ in range(count):
        k = tl.load(k_at, mask=there, other=0.0)
        v = tl.load(v_at, mask=there, other=0.0)
        seen, weight, _most = with_token(above, below, exponent, k + bonus, v)
        tl.store(out_at, seen / weight, mask=there)
        above, below, exponent = with_token(above, below, exponent + decay, k, v)
        k_at += ks
        v_at += vs
        out_at += os
    for _ in range(count, tokens):
        tl.store(out_at, tl.zeros((C,), tl.float32), mask=there)
        out_at += os
    tl.store(state_at, above, mask=there)
    tl.store(state_at + channels, below, mask=there)
    tl.store(state_at + 2 * channels, exponent, mask=there)


def bind_wkv(
    k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, state: Tensor, start: Tensor, count: Tensor, out: Tensor
) -> Callable[[], None]:
    """wkv as a call without arguments, on the tensors' contents at each call; the checks are made here."""
    check_arguments(k, v, log_decay, bonus, state, start, count)
    check_tensor(OP, "state", state)
    check_tensor(OP, "out", out, device=k.device, dtype=k.dtype, shape=k.shape)
    batch, tokens, channels = k.shape
    if k.numel() == 0:
        return lambda: None
    return bound(kernel_call(
        wkv_kernel, (triton.cdiv(channels, CHANNELS), batch), k, v, log_decay, bonus, state, start, count, out, tokens,
        channels, *k.stride()[:2], *v.stride()[:2], *out.stride()[:2], EMPTY=EMPTY, C=CHANNELS, num_warps=2,
    ))  # fmt: skip
