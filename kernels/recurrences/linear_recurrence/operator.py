"""`forebay::linear_recurrence`: of each head a state [Dk, Dv] that every token decays, corrects and adds to.

    state = exp(log_decay[t]) * state                  (a decay for each head, or for each of its Dk rows)
    u = beta[t] * (v[t] - state^T k[t])                (the delta rule; without beta, u = v[t])
    state = state + k[t] u^T
    out[t] = state^T q[t]

Heads share q and k in groups, consecutive ones each. It is the gated delta rule (arXiv 2412.06464, equation 10), with a
decay for each channel Kimi's (arXiv 2510.26692), without beta Mamba-2's state space duality (arXiv 2405.21060) and
linear attention. `log_decay` is never above 0. Start and count: `recurrences/steps.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forebay.kernels.operator import Call, Cost, Operator, Tensors, Use, in_columns, nbytes_of
from forebay.kernels.recurrences.linear_recurrence.cpu import bind_linear_recurrence
from forebay.kernels.recurrences.linear_recurrence.reference import reference


@torch.library.custom_op("forebay::linear_recurrence", mutates_args=("state",), device_types="cpu")
def linear_recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor, start: Tensor,
    count: Tensor,
) -> Tensor:
    """q, k [B, S, Hk, Dk], v [B, S, H, Dv], log_decay [B, S, H] or [B, S, H, Dk], beta [B, S, H], state
    [B, H, Dk, Dv], all float32; start and count int64 [B] -> contiguous [B, S, H, Dv]. ValueError names what is wrong.
    """
    out = torch.empty(v.shape)
    q, k, v, log_decay = (in_columns(t) for t in (q, k, v, log_decay))
    beta = None if beta is None else in_columns(beta)
    bind_linear_recurrence(q, k, v, log_decay, beta, state, start, count, out)()
    return out


@linear_recurrence.register_kernel("cuda")
def _(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor, start: Tensor,
    count: Tensor,
) -> Tensor:
    out = v.new_empty(v.shape)
    given = (None if t is None else in_columns(t) for t in (q, k, v, log_decay, beta))
    _bind_cuda(Tensors((*given, state, start, count), {}, (out,)))()
    return out


@linear_recurrence.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor, start: Tensor,
    count: Tensor,
) -> Tensor:
    return v.new_empty(v.shape)


def _bind_cuda(use: Use) -> Call:
    from forebay.kernels.recurrences.linear_recurrence.gpu import bind_linear_recurrence as bind

    return bind(*use.args, *use.out)


def _cost(use: Use) -> Cost:
    state = use.args[5]
    products = 2 if use.args[4] is None else 3
    flops = (2 * products + 1) * math.prod(state.shape) * use.args[2].shape[1]
    return Cost(flops, nbytes_of(*use.args), nbytes_of(*use.out, state))


LINEAR_RECURRENCE = Operator(
    torch.ops.forebay.linear_recurrence.default,
    reference,
    _cost,
    bind={"cpu": lambda use: bind_linear_recurrence(*use.args, *use.out), "cuda": _bind_cuda},
    layouts={**dict.fromkeys(("q", "k", "v", "log_decay", "beta"), "columns"),
             **dict.fromkeys(("state", "start", "count"), "dense")},
)
