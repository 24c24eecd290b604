"""`forebay::linear_recurrence` in Triton: a program walks some columns of a head's state through a sequence's tokens.

Columns of a state do not see each other; a program's stay in registers from the first token to the last.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.gpu_support.arguments import check_tensor
from forebay.kernels.gpu_support.launches import bound, kernel_call
from forebay.kernels.recurrences.linear_recurrence.reference import check_arguments

OP = "linear_recurrence"
NUMBERS = 4096  # of a state that a program holds: 32 a thread


@triton.jit
def linear_recurrence_kernel(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, state_ptr, start_ptr, count_ptr, out_ptr,
    tokens, heads, group, width, columns, qb, qs, qh, kb, ks, kh, vb, vs, vh, db, ds, dh, bb, bs, ob, os, oh,
    CORRECTS: tl.constexpr, BY_CHANNEL: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Program (tile of columns, sequence and head)."""
    b = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    few = (head // group).to(tl.int64)
    head = head.to(tl.int64)
    i, column = tl.arange(0, K), tl.program_id(1) * V + tl.arange(0, V)
    row, there = i < width, column < columns
    count = tl.minimum(tl.maximum(tl.load(count_ptr + b), 0), tokens).to(tl.int32)
    state_at = state_ptr + (b * heads + head) * width * columns + i.to(tl.int64)[:, None] * columns + column[None, :]
    inside = row[:, None] & there[None, :]
    held = tl.load(state_at, mask=inside & (tl.load(start_ptr + b) != 0), other=0.0)
    q_at, k_at = q_ptr + b * qb + few * qh + i, k_ptr + b * kb + few * kh + i
    v_at, out_at = v_ptr + b * vb + head * vh + column, out_ptr + b * ob + head * oh + column
    decay_at, beta_at = decay_ptr + b * db + head * dh, beta_ptr + b * bb + head
    for _ in range(count):
        q = tl.load(q_at, mask=row, other=0.0)
        k = tl.load(k_at, mask=row, other=0.0)
        value = tl.load(v_at, mask=there, other=0.0)
        if BY_CHANNEL:
            held *= tl.exp(tl.load(decay_at + i, mask=row, other=0.0))[:, None]
        else:
            held *= tl.exp(tl.load(decay_at))
        if CORRECTS:
            value = tl.load(beta_at) * (value - tl.sum(held * k[:, None], 0))
            beta_at += bs
        held += k[:, None] * value[None, :]
        tl.store(out_at, tl.sum(held * q[:, None], 0), mask=there)
        q_at += qs
        k_at += ks
        v_at += vs
        decay_at += ds
        out_at += os
    for _ in range(count, tokens):
        tl.store(out_at, tl.zeros((V,), tl.float32), mask=there)
        out_at += os
    tl.store(state_at, held, mask=inside)


def tile(width: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of a state that one program holds."""
    rows = triton.next_power_of_2(width)
    return rows, min(triton.next_power_of_2(columns), 64, max(1, NUMBERS // rows))


def bind_linear_recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor, start: Tensor,
    count: Tensor, out: Tensor,
) -> Callable[[], None]:
    """linear_recurrence as a call without arguments, on the tensors' contents at each call; the checks are made
    here."""
    check_arguments(q, k, v, log_decay, beta, state, start, count)
    check_tensor(OP, "state", state)
    check_tensor(OP, "out", out, device=v.device, dtype=v.dtype, shape=v.shape)
    if v.numel() == 0:
        return lambda: None
    batch, tokens, heads, columns = v.shape
    width = k.shape[3]
    rows, part = tile(width, columns)
    beta_strides = (0, 0) if beta is None else beta.stride()[:2]
    return bound(kernel_call(
        linear_recurrence_kernel, (batch * heads, triton.cdiv(columns, part)),  # axes behind the first end at 65535
        q, k, v, log_decay, v if beta is None else beta, state, start, count, out,
        tokens, heads, heads // k.shape[2], width, columns, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        *log_decay.stride()[:3], *beta_strides, *out.stride()[:3],
        CORRECTS=beta is not None, BY_CHANNEL=log_decay.dim() == 4, K=rows, V=part, num_warps=4,
    ))  # fmt: skip
