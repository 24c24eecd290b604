"""`forebay::selective_scan`: Mamba's state space (arXiv 2312.00752, section 3), its state kept from step to step.

    state[c, n] = exp(dt[t, c] * a[c, n]) * state[c, n] + dt[t, c] * x[t, c] * b[t, n]
    out[t, c] = sum over n of state[c, n] * c[t, n]

dt * a is never above 0. Start and count: `recurrences/steps.py`.
"""

from __future__ import annotations

import math

from torch import Tensor

from forebay.kernels.define import define_operator, filling, on_gpu
from forebay.kernels.operator import Cost, Use, nbytes_of
from forebay.kernels.recurrences.selective_scan.cpu import bind_selective_scan
from forebay.kernels.recurrences.selective_scan.reference import reference


def _selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, start: Tensor, count: Tensor
) -> Tensor:
    """x, dt [B, S, C], a [C, N], b, c [B, S, N], state [B, C, N], all float32; start and count int64 [B] -> contiguous
    [B, S, C]. ValueError names what is wrong."""
    return x.new_empty(x.shape)


def _cost(use: Use) -> Cost:
    x, state = use.args[0], use.args[5]
    return Cost(6 * math.prod(state.shape) * x.shape[1], nbytes_of(*use.args), nbytes_of(*use.out, state))


SELECTIVE_SCAN = define_operator(
    _selective_scan,
    writes=("state",),
    reference=reference,
    cost=_cost,
    bind={"cpu": filling(bind_selective_scan), "cuda": on_gpu(f"{__package__}.gpu", "bind_selective_scan")},
    layouts={**dict.fromkeys(("b", "c"), "columns"),
             **dict.fromkeys(("a", "state", "start", "count"), "dense")},
)
