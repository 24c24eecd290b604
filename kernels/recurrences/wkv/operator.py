"""`forebay::wkv`: RWKV-4's weighted average of values (arXiv 2305.13048, equation 16), its sums kept from step to step.

    out[t] = (above + exp(bonus + k[t]) * v[t]) / (below + exp(bonus + k[t]))
    above = exp(log_decay) * above + exp(k[t]) * v[t]
    below = exp(log_decay) * below + exp(k[t])

of each channel. `state` [B, 3, C] holds above and below, both divided by exp of its last row, so that no sum overflows.
`log_decay` is never above 0. Start and count: `recurrences/steps.py`.
"""

from __future__ import annotations

import math

from torch import Tensor

from forebay.kernels.define import define_operator, filling, on_gpu
from forebay.kernels.operator import Cost, Use, nbytes_of
from forebay.kernels.recurrences.wkv.cpu import bind_wkv
from forebay.kernels.recurrences.wkv.reference import reference


def _wkv(
    k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, state: Tensor, start: Tensor, count: Tensor
) -> Tensor:
    """k, v [B, S, C], log_decay, bonus [C], state [B, 3, C], all float32; start and count int64 [B] -> contiguous
    [B, S, C]. ValueError names what is wrong."""
    return k.new_empty(k.shape)


def _cost(use: Use) -> Cost:
    return Cost(20 * math.prod(use.args[0].shape), nbytes_of(*use.args), nbytes_of(*use.out, use.args[4]))


WKV = define_operator(
    _wkv,
    writes=("state",),
    reference=reference,
    cost=_cost,
    bind={"cpu": filling(bind_wkv), "cuda": on_gpu(f"{__package__}.gpu", "bind_wkv")},
    layouts={**dict.fromkeys(("k", "v"), "columns"),
             **dict.fromkeys(("log_decay", "bonus", "state", "start", "count"), "dense")},
)
