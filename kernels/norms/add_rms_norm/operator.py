"""`forebay::add_rms_norm`: the sum of a branch and the residual stream, and the sum's root-mean-square norm."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.norms import onnx
from forebay.kernels.norms.add_rms_norm.reference import check, reference
from forebay.kernels.norms.rms_norm import cpu as rms_norm_cpu
from forebay.kernels.operator import Operator, each_once


@torch.library.custom_op("forebay::add_rms_norm", mutates_args=(), device_types="cpu")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [..., H], weight [H] -> (normed, summed), both contiguous; ValueError names what is wrong."""
    check(x, residual, weight)
    summed = torch.add(x, residual, out=x.new_empty(x.shape))
    normed = x.new_empty(x.shape)
    rms_norm_cpu.bind_rms_norm(summed, weight, eps, normed)()
    return normed, summed


@add_rms_norm.register_kernel("cuda")
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from forebay.kernels.norms.rms_norm.gpu import rms_norm as launch

    normed, summed = x.new_empty(x.shape), x.new_empty(x.shape)
    launch(x, weight, eps, normed, residual, summed)
    return normed, summed


@add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


ADD_RMS_NORM = Operator(torch.ops.forebay.add_rms_norm.default, reference, each_once, onnx=onnx.add_rms_norm)
