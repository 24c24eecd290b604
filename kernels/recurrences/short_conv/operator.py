"""`forebay::short_conv`: a causal depthwise convolution of a few taps that keeps its last inputs from step to step.

out[b, t, c] = act(bias[c] + sum over j of weight[c, j] * x[b, t - K + 1 + j, c]); rows before the first are those that
`state` [B, K - 1, C] kept, which then holds the last ones that count (`recurrences/steps.py`).
"""

from __future__ import annotations

import math

from torch import Tensor

from forebay.kernels.define import define_operator
from forebay.kernels.operator import Call, Cost, Use, nbytes_of
from forebay.kernels.recurrences.short_conv.cpu import bind_short_conv
from forebay.kernels.recurrences.short_conv.reference import reference


def _short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, start: Tensor, count: Tensor, activation: str = ""
) -> Tensor:
    """x [B, S, C], weight [C, K], bias [C], state [B, K - 1, C], all of one dtype; start and count int64 [B] ->
    contiguous [B, S, C]; `activation` is "" or "silu". ValueError names what is wrong."""
    return x.new_empty(x.shape)


def _bind_cpu(use: Use) -> Call:
    return bind_short_conv(*use.args[:6], *(use.args[6:] or ("",)), *use.out)


def _bind_cuda(use: Use) -> Call:
    from forebay.kernels.recurrences.short_conv.gpu import bind_short_conv as bind

    return bind(*use.args[:6], *(use.args[6:] or ("",)), *use.out)


def _cost(use: Use) -> Cost:
    x, weight, bias, state, *_ = use.args
    return Cost(2 * math.prod(x.shape) * weight.shape[1], nbytes_of(x, weight, bias, state),
                nbytes_of(*use.out, state))


SHORT_CONV = define_operator(
    _short_conv,
    writes=("state",),
    reference=reference,
    cost=_cost,
    bind={"cpu": _bind_cpu, "cuda": _bind_cuda},
    layouts={"x": "columns", **dict.fromkeys(("weight", "bias", "state", "start", "count"), "dense")},
)
