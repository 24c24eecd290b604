"""`forebay::rms_norm`: root-mean-square norm with a weight, rounded as Llama's.

y = round(x rsqrt(mean(x^2) + eps)) and out = round(weight y), the mean in fp32 over the last dimension (Zhang and
Sennrich 2019). x, weight and out are of one dtype: fp32, bf16 or fp16. The C++ kernel (`rms_norm.cpp`) reads x twice
and allocates nothing; without a compiler, or for strides that it does not know, torch does the work.
"""

from __future__ import annotations

from torch import Tensor

from forebay.kernels.define import define_operator, filling, on_gpu
from forebay.kernels.norms import onnx
from forebay.kernels.norms.rms_norm.cpu import bind_rms_norm
from forebay.kernels.norms.rms_norm.reference import reference
from forebay.kernels.operator import each_once


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] of any strides, weight [H] -> contiguous [..., H]; ValueError names the argument that is wrong."""
    return x.new_empty(x.shape)


RMS_NORM = define_operator(
    _rms_norm,
    reference=reference,
    cost=each_once,
    bind={"cpu": filling(bind_rms_norm), "cuda": on_gpu(f"{__package__}.gpu", "bind_rms_norm")},
    layouts={"x": "columns", "weight": "dense"},
    onnx=onnx.rms_norm,
)
