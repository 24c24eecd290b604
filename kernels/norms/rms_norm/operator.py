"""`forebay::rms_norm`: root-mean-square norm with a weight, rounded as Llama's.

y = round(x rsqrt(mean(x^2) + eps)) and out = round(weight y), the mean in fp32 over the last dimension (Zhang and
Sennrich 2019). x, weight and out are of one dtype: fp32, bf16 or fp16. The C++ kernel (`rms_norm.cpp`) reads x twice
and allocates nothing; without a compiler, or for strides that it does not know, torch does the work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.norms import onnx
from forebay.kernels.norms.rms_norm.cpu import bind_rms_norm
from forebay.kernels.norms.rms_norm.reference import reference
from forebay.kernels.operator import Call, Operator, Use, each_once, in_columns


@torch.library.custom_op("forebay::rms_norm", mutates_args=(), device_types="cpu")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] of any strides, weight [H] -> contiguous [..., H]; ValueError names the argument that is wrong."""
    out = x.new_empty(x.shape)
    bind_rms_norm(x, weight, eps, out)()
    return out


@rms_norm.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from forebay.kernels.norms.rms_norm.gpu import rms_norm as launch

    out = x.new_empty(x.shape)
    launch(in_columns(x), weight.contiguous(), eps, out)
    return out


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _bind_cuda(use: Use) -> Call:
    from forebay.kernels.norms.rms_norm.gpu import bind_rms_norm as bind

    return bind(*(*use.args, *use.out))


RMS_NORM = Operator(
    torch.ops.forebay.rms_norm.default,
    reference,
    each_once,
    bind={"cpu": lambda use: bind_rms_norm(*(*use.args, *use.out)), "cuda": _bind_cuda},
    layouts={"x": "columns", "weight": "dense"},
    onnx=onnx.rms_norm,
)
