"""`forebay::selective_scan`: Mamba's state space (arXiv 2312.00752, section 3), its state kept from step to step.

    state[c, n] = exp(dt[t, c] * a[c, n]) * state[c, n] + dt[t, c] * x[t, c] * b[t, n]
    out[t, c] = sum over n of state[c, n] * c[t, n]

dt * a is never above 0. Start and count: `recurrences/steps.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forebay.kernels.operator import Call, Cost, Operator, Tensors, Use, in_columns, nbytes_of
from forebay.kernels.recurrences.selective_scan.cpu import bind_selective_scan
from forebay.kernels.recurrences.selective_scan.reference import reference


@torch.library.custom_op("forebay::selective_scan", mutates_args=("state",), device_types="cpu")
def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, start: Tensor, count: Tensor
) -> Tensor:
    """x, dt [B, S, C], a [C, N], b, c [B, S, N], state [B, C, N], all float32; start and count int64 [B] -> contiguous
    [B, S, C]. ValueError names what is wrong."""
    out = torch.empty(x.shape)
    bind_selective_scan(x, dt, a.contiguous(), in_columns(b), in_columns(c), state, start, count, out)()
    return out


@selective_scan.register_kernel("cuda")
def _(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, start: Tensor, count: Tensor
) -> Tensor:
    out = x.new_empty(x.shape)
    _bind_cuda(Tensors((x, dt, a.contiguous(), in_columns(b), in_columns(c), state, start, count), {}, (out,)))()
    return out


@selective_scan.register_fake
def _(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, start: Tensor, count: Tensor
) -> Tensor:
    return x.new_empty(x.shape)


def _bind_cuda(use: Use) -> Call:
    from forebay.kernels.recurrences.selective_scan.gpu import bind_selective_scan as bind

    return bind(*use.args, *use.out)


def _cost(use: Use) -> Cost:
    x, state = use.args[0], use.args[5]
    return Cost(6 * math.prod(state.shape) * x.shape[1], nbytes_of(*use.args), nbytes_of(*use.out, state))


SELECTIVE_SCAN = Operator(
    torch.ops.forebay.selective_scan.default,
    reference,
    _cost,
    bind={"cpu": lambda use: bind_selective_scan(*use.args, *use.out), "cuda": _bind_cuda},
    layouts={**dict.fromkeys(("b", "c"), "columns"),
             **dict.fromkeys(("a", "state", "start", "count"), "dense")},
)
