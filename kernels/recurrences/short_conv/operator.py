"""`forebay::short_conv`: a causal depthwise convolution of a few taps that keeps its last inputs from step to step.

out[b, t, c] = act(bias[c] + sum over j of weight[c, j] * x[b, t - K + 1 + j, c]); rows before the first are those that
`state` [B, K - 1, C] kept, which then holds the last ones that count (`recurrences/steps.py`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forebay.kernels.operator import Call, Cost, Operator, Tensors, Use, in_columns, nbytes_of
from forebay.kernels.recurrences.short_conv.cpu import bind_short_conv
from forebay.kernels.recurrences.short_conv.reference import reference


@torch.library.custom_op("forebay::short_conv", mutates_args=("state",), device_types="cpu")
def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, start: Tensor, count: Tensor, activation: str = ""
) -> Tensor:
    """x [B, S, C], weight [C, K], bias [C], state [B, K - 1, C], all of one dtype; start and count int64 [B] ->
    contiguous [B, S, C]; `activation` is "" or "silu". ValueError names what is wrong."""
    out = torch.empty(x.shape, dtype=x.dtype)
    bias = None if bias is None else bias.contiguous()
    bind_short_conv(in_columns(x), weight.contiguous(), bias, state, start, count, activation, out)()
    return out


@short_conv.register_kernel("cuda")
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, start: Tensor, count: Tensor, activation: str = ""
) -> Tensor:
    out = x.new_empty(x.shape)
    bias = None if bias is None else bias.contiguous()
    _bind_cuda(Tensors((in_columns(x), weight.contiguous(), bias, state, start, count, activation), {}, (out,)))()
    return out


@short_conv.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, start: Tensor, count: Tensor, activation: str = ""
) -> Tensor:
    return x.new_empty(x.shape)


def _bind_cuda(use: Use) -> Call:
    from forebay.kernels.recurrences.short_conv.gpu import bind_short_conv as bind

    return bind(*use.args[:6], *(use.args[6:] or ("",)), *use.out)


def _cost(use: Use) -> Cost:
    x, weight, bias, state, *_ = use.args
    return Cost(2 * math.prod(x.shape) * weight.shape[1], nbytes_of(x, weight, bias, state),
                nbytes_of(*use.out, state))


SHORT_CONV = Operator(
    torch.ops.forebay.short_conv.default,
    reference,
    _cost,
    bind={"cpu": lambda use: bind_short_conv(*use.args[:6], *(use.args[6:] or ("",)), *use.out),
          "cuda": _bind_cuda},
    layouts={"x": "columns", "weight": "dense", "bias": "dense", "state": "dense", "start": "dense", "count": "dense"},
)
