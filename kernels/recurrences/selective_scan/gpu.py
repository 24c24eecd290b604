"""`forebay::selective_scan` in Triton: a program walks some channels' states through the tokens of a sequence."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.gpu_support.arguments import check_tensor
from forebay.kernels.gpu_support.launches import bound, kernel_call
from forebay.kernels.recurrences.selective_scan.reference import check_arguments

OP = "selective_scan"
NUMBERS = 2048  # of states that a program holds


@triton.jit
def selective_scan_kernel(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, state_ptr, start_ptr, count_ptr, out_ptr, tokens, channels, width,
    xb, xs, xc, db, ds, dc, bb, bs, cb, cs, ob, os, oc,
    C: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Program (tile of channels, sequence)."""
    row = tl.program_id(1).to(tl.int64)
    channel = (tl.program_id(0) * C + tl.arange(0, C)).to(tl.int64)
    n = tl.arange(0, N)
    there = channel < channels
    held_at = channel[:, None] * width + n[None, :]
    inside = there[:, None] & (n < width)[None, :]
    count = tl.minimum(tl.maximum(tl.load(count_ptr + row), 0), tokens).to(tl.int32)
    a = tl.load(a_ptr + held_at, mask=inside, other=0.0)
    state_at = state_ptr + row * channels * width + held_at
    held = tl.load(state_at, mask=inside & (tl.load(start_ptr + row) != 0), other=0.0)
    x_at, dt_at = x_ptr + row * xb + channel * xc, dt_ptr + row * db + channel * dc
    out_at, b_at, c_at = out_ptr + row * ob + channel * oc, b_ptr + row * bb + n, c_ptr + row * cb + n
    for _ in range(count):
        dt = tl.load(dt_at, mask=there, other=0.0)
        given = dt * tl.load(x_at, mask=there, other=0.0)
        b = tl.load(b_at, mask=n < width, other=0.0)
        c = tl.load(c_at, mask=n < width, other=0.0)
        held = tl.exp(dt[:, None] * a) * held + given[:, None] * b[None, :]
        tl.store(out_at, tl.sum(held * c[None, :], 1), mask=there)
        x_at += xs
        dt_at += ds
        b_at += bs
        c_at += cs
        out_at += os
    for _ in range(count, tokens):
        tl.store(out_at, tl.zeros((C,), tl.float32), mask=there)
        out_at += os
    tl.store(state_at, held, mask=inside)


def bind_selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, start: Tensor, count: Tensor, out: Tensor
) -> Callable[[], None]:
    """selective_scan as a call without arguments, on the tensors' contents at each call; the checks are made here."""
    check_arguments(x, dt, a, b, c, state, start, count)
    check_tensor(OP, "state", state)
    check_tensor(OP, "out", out, device=x.device, dtype=x.dtype, shape=x.shape)
    (batch, tokens, channels), width = x.shape, a.shape[1]
    if x.numel() == 0:
        return lambda: None
    numbers = triton.next_power_of_2(width)
    tile = max(1, min(64, NUMBERS // numbers))
    return bound(kernel_call(
        selective_scan_kernel, (triton.cdiv(channels, tile), batch),
        x, dt, a, b, c, state, start, count, out, tokens, channels, width, *x.stride(), *dt.stride(), *b.stride()[:2],
        *c.stride()[:2], *out.stride(), C=tile, N=numbers, num_warps=4,
    ))  # fmt: skip
