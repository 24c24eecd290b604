"""`forebay::layer_norm`: layer norm over the last dimension.

out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, rounded once, the variance biased (Ba et al. 2016). fp32, bf16
or fp16, one dtype for all. The C++ kernel (`layer_norm.cpp`) reads x three times, from the cache but for the first, and
allocates nothing; without a compiler, or for strides that it does not know, torch does the work.
"""

from __future__ import annotations

from torch import Tensor

from forebay.kernels.define import define_operator, filling, on_gpu
from forebay.kernels.norms import onnx
from forebay.kernels.norms.layer_norm import cpu
from forebay.kernels.norms.layer_norm.reference import FLOATS, reference
from forebay.kernels.norms.rms_norm.reference import MAX_COLUMNS
from forebay.kernels.operator import each_once


def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., H] of any strides -> contiguous [..., H]; ValueError names the argument that is wrong."""
    return x.new_empty(x.shape)


def _takes(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Tensors of one dtype, and rows that a GPU's kernel holds."""
    dtypes = {t.dtype for t in (x, weight, bias) if t is not None}
    return dtypes == {x.dtype} and x.dtype in FLOATS and isinstance(x.shape[-1], int) and x.shape[-1] <= MAX_COLUMNS


LAYER_NORM = define_operator(
    _layer_norm,
    reference=reference,
    cost=each_once,
    bind={"cpu": filling(cpu.bind_layer_norm), "cuda": on_gpu(f"{__package__}.gpu", "bind_layer_norm")},
    workspace={"cpu": cpu.workspace_nbytes},
    takes=_takes,
    layouts={"x": "columns", "weight": "dense", "bias": "dense"},
    onnx=onnx.layer_norm,
)
