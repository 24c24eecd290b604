"""`forebay::short_conv` in Triton: a program has some tokens of some channels; the first ones renew the state."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.gpu_support.arguments import check_tensor
from forebay.kernels.gpu_support.cache_tiles import round_to
from forebay.kernels.gpu_support.launches import bound, kernel_call
from forebay.kernels.recurrences.short_conv.reference import check_arguments

OP = "short_conv"
CHANNELS, TOKENS = 64, 16  # of a program


@triton.jit
def rows_at(x_ptr, state_ptr, at, channel, used, xs, channels, begins, KEPT: tl.constexpr):
    """Rows of inputs `at` tokens behind the first, of the state where negative, [rows, channels] in fp32."""
    inside = used[:, None] & (channel < channels)[None, :]
    new = tl.load(x_ptr + at.to(tl.int64)[:, None] * xs + channel[None, :],
                  mask=inside & (at >= 0)[:, None], other=0.0)  # fmt: skip
    old = tl.load(state_ptr + (KEPT + at).to(tl.int64)[:, None] * channels + channel[None, :],
                  mask=inside & ((at < 0) & (at >= -KEPT) & (begins == 0))[:, None], other=0.0)  # fmt: skip
    return tl.where((at >= 0)[:, None], new, old)


@triton.jit
def short_conv_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, start_ptr, count_ptr, out_ptr, tokens, channels, xb, xs, ob, os,
    TAPS: tl.constexpr, KEPT_P: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Program (tile of tokens, tile of channels, sequence); T >= TAPS - 1, so that only the first tile reads the state,
    which it renews after."""
    b = tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    t = tl.program_id(0) * T + tl.arange(0, T)
    count = tl.minimum(tl.maximum(tl.load(count_ptr + b), 0), tokens).to(tl.int32)
    begins = tl.load(start_ptr + b) == 0
    x_ptr += b * xb
    state_ptr += b * (TAPS - 1) * channels
    there = channel < channels
    made = tl.zeros((T, C), tl.float32)
    if HAS_BIAS:
        made += tl.load(bias_ptr + channel, mask=there, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(TAPS):
        w = tl.load(weight_ptr + channel.to(tl.int64) * TAPS + j, mask=there, other=0.0).to(tl.float32)
        row = rows_at(x_ptr, state_ptr, t - TAPS + 1 + j, channel, t < count, xs, channels, begins, TAPS - 1)
        made += row.to(tl.float32) * w[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if SILU:
        made = round_to(made, dtype).to(tl.float32)
        made = made / (1.0 + tl.exp(-made))
    made = tl.where((t < count)[:, None], made, 0.0)
    tl.store(out_ptr + b * ob + t.to(tl.int64)[:, None] * os + channel[None, :], round_to(made, dtype),
             mask=(t < tokens)[:, None] & there[None, :])  # fmt: skip
    if tl.program_id(0) == 0:
        r = tl.arange(0, KEPT_P)
        used = r < TAPS - 1
        kept = rows_at(x_ptr, state_ptr, count - TAPS + 1 + r, channel, used, xs, channels, begins, TAPS - 1)
        tl.debug_barrier()  # a row that one thread reads is written by another
        state_at = state_ptr + r[:, None] * channels + channel[None, :]
        tl.store(state_at, kept, mask=used[:, None] & there[None, :])


def bind_short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, start: Tensor, count: Tensor, activation: str,
    out: Tensor,
) -> Callable[[], None]:
    """short_conv as a call without arguments, on the tensors' contents at each call; the checks are made here."""
    check_arguments(x, weight, bias, state, start, count, activation)
    check_tensor(OP, "x", x)
    check_tensor(OP, "out", out, device=x.device, dtype=x.dtype, shape=x.shape)
    batch, tokens, channels = x.shape
    if x.numel() == 0:
        return lambda: None
    taps = weight.shape[1]
    tile = max(min(TOKENS, triton.next_power_of_2(tokens)), triton.next_power_of_2(max(1, taps - 1)))
    return bound(kernel_call(
        short_conv_kernel, (triton.cdiv(tokens, tile), triton.cdiv(channels, CHANNELS), batch),
        x, weight, x if bias is None else bias, state, start, count, out, tokens, channels, *x.stride()[:2],
        *out.stride()[:2], TAPS=taps, KEPT_P=triton.next_power_of_2(max(1, taps - 1)), T=tile, C=CHANNELS,
        HAS_BIAS=bias is not None, SILU=activation == "silu", num_warps=4,
    ))  # fmt: skip
