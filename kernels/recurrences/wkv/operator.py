"""`forebay::wkv`: RWKV-4's weighted average of values (arXiv 2305.13048, equation 16), its sums kept from step to step.

    out[t] = (above + exp(bonus + k[t]) * v[t]) / (below + exp(bonus + k[t]))
    above = exp(log_decay) * above + exp(k[t]) * v[t]
    below = exp(log_decay) * below + exp(k[t])

of each channel. `state` [B, 3, C] holds above and below, both divided by exp of its last row, so that no sum overflows.
`log_decay` is never above 0. Start and count: `recurrences/steps.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forebay.kernels.operator import Call, Cost, Operator, Tensors, Use, in_columns, nbytes_of
from forebay.kernels.recurrences.wkv.cpu import bind_wkv
from forebay.kernels.recurrences.wkv.reference import reference


@torch.library.custom_op("forebay::wkv", mutates_args=("state",), device_types="cpu")
def wkv(
    k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, state: Tensor, start: Tensor, count: Tensor
) -> Tensor:
    """k, v [B, S, C], log_decay, bonus [C], state [B, 3, C], all float32; start and count int64 [B] -> contiguous
    [B, S, C]. ValueError names what is wrong."""
    out = torch.empty(k.shape)
    bind_wkv(in_columns(k), in_columns(v), log_decay.contiguous(), bonus.contiguous(), state, start, count, out)()
    return out


@wkv.register_kernel("cuda")
def _(
    k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, state: Tensor, start: Tensor, count: Tensor
) -> Tensor:
    out = k.new_empty(k.shape)
    given = (in_columns(k), in_columns(v), log_decay.contiguous(), bonus.contiguous())
    _bind_cuda(Tensors((*given, state, start, count), {}, (out,)))()
    return out


@wkv.register_fake
def _(
    k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, state: Tensor, start: Tensor, count: Tensor
) -> Tensor:
    return k.new_empty(k.shape)


def _bind_cuda(use: Use) -> Call:
    from forebay.kernels.recurrences.wkv.gpu import bind_wkv as bind

    return bind(*use.args, *use.out)


def _cost(use: Use) -> Cost:
    return Cost(20 * math.prod(use.args[0].shape), nbytes_of(*use.args), nbytes_of(*use.out, use.args[4]))


WKV = Operator(
    torch.ops.forebay.wkv.default,
    reference,
    _cost,
    bind={"cpu": lambda use: bind_wkv(*use.args, *use.out), "cuda": _bind_cuda},
    layouts={**dict.fromkeys(("k", "v"), "columns"),
             **dict.fromkeys(("log_decay", "bonus", "state", "start", "count"), "dense")},
)
