"""`forebay::swiglu`: act(x G^T) * (x U^T), the gated half of a feed-forward network (Shazeer 2020).

Both products, the activation and the result round to x's dtype, as the operators apart would. On the CPU two calls of
`forebay::linear` do it: the second multiplies by the first's result where it lies, so nothing is gained by more. The
rewriter writes those two (`passes/fuse/fuse_swiglu.py`), whose weights may stream one after the other; the operator is
for devices where x is worth reading once for both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forebay.kernels.operator import Call, Cost, Operator, Use, each_once
from forebay.kernels.products.linear import cpu as linear_cpu
from forebay.kernels.products.linear import reference as linear_reference
from forebay.kernels.products.swiglu.reference import check, reference


@torch.library.custom_op("forebay::swiglu", mutates_args=(), device_types="cpu")
def swiglu(x: Tensor, gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """x [..., K], gate and up [N, K], all of one dtype -> contiguous [..., N]; ValueError names what is wrong."""
    check(x, gate, up, activation)
    out = torch.ops.forebay.linear(x, gate, None, None, None, activation)
    flat, matrix = x.contiguous(), up.contiguous()
    impl = linear_cpu.default_choice(up.dtype, x.numel() // max(1, x.shape[-1]), *up.shape)
    linear_cpu.run(impl, flat, matrix, None, out, after=linear_reference.After(multiplier=out))
    return out


@swiglu.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    return x.new_empty(*x.shape[:-1], gate.shape[0])


@swiglu.register_kernel("cuda")
def _(x: Tensor, gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    from forebay.kernels.products.swiglu.gpu import swiglu as launch  # Triton is needed only here

    check(x, gate, up, activation)
    out = x.new_empty(*x.shape[:-1], gate.shape[0])
    launch(x, gate, up, activation, out)
    return out


def _bind_cuda(use: Use) -> Call:
    from forebay.kernels.products.swiglu.gpu import bind_swiglu as bind

    return bind(*(*use.args, *use.out))


def _cost(use: Use) -> Cost:
    x, gate = use.args[:2]
    return each_once(use)._replace(flops=4 * math.prod(x.shape) * gate.shape[0])


SWIGLU = Operator(torch.ops.forebay.swiglu.default, reference, _cost, bind={"cuda": _bind_cuda})
