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

from torch import Tensor

from forebay.kernels.define import define_operator, filling, on_gpu
from forebay.kernels.operator import Cost, Use, nbytes_of
from forebay.kernels.recurrences.linear_recurrence.cpu import bind_linear_recurrence, workspace_nbytes
from forebay.kernels.recurrences.linear_recurrence.reference import reference


def _linear_recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor, start: Tensor,
    count: Tensor,
) -> Tensor:
    """q, k [B, S, Hk, Dk], v [B, S, H, Dv], log_decay [B, S, H] or [B, S, H, Dk], beta [B, S, H], state
    [B, H, Dk, Dv], all float32; start and count int64 [B] -> contiguous [B, S, H, Dv]. ValueError names what is wrong.
    """
    return v.new_empty(v.shape)


def _cost(use: Use) -> Cost:
    state = use.args[5]
    products = 2 if use.args[4] is None else 3
    flops = (2 * products + 1) * math.prod(state.shape) * use.args[2].shape[1]
    return Cost(flops, nbytes_of(*use.args), nbytes_of(*use.out, state))


LINEAR_RECURRENCE = define_operator(
    _linear_recurrence,
    writes=("state",),
    reference=reference,
    cost=_cost,
    bind={"cpu": filling(bind_linear_recurrence), "cuda": on_gpu(f"{__package__}.gpu", "bind_linear_recurrence")},
    workspace={"cpu": lambda use: workspace_nbytes(use.args[2].shape[1], *use.args[5].shape[1:])},
    layouts={**dict.fromkeys(("q", "k", "v", "log_decay", "beta"), "columns"),
             **dict.fromkeys(("state", "start", "count"), "dense")},
)
