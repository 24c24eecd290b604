"""`forebay::layer_norm`: layer norm over the last dimension.

out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, rounded once, the variance biased (Ba et al. 2016). fp32, bf16
or fp16, one dtype for all. The C++ kernel (`layer_norm.cpp`) reads x three times, from the cache but for the first, and
allocates nothing; without a compiler, or for strides that it does not know, torch does the work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.norms import onnx
from forebay.kernels.norms.layer_norm import cpu
from forebay.kernels.norms.layer_norm.reference import FLOATS, reference
from forebay.kernels.norms.rms_norm.reference import MAX_COLUMNS
from forebay.kernels.operator import Call, Operator, Use, each_once, in_columns


@torch.library.custom_op("forebay::layer_norm", mutates_args=(), device_types="cpu")
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., H] of any strides -> contiguous [..., H]; ValueError names the argument that is wrong."""
    out = x.new_empty(x.shape)
    cpu.bind_layer_norm(x, weight, bias, eps, out)()
    return out


@layer_norm.register_kernel("cuda")
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    from forebay.kernels.norms.layer_norm.gpu import layer_norm as launch

    out = x.new_empty(x.shape)
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    launch(in_columns(x), weight, bias, eps, out)
    return out


@layer_norm.register_fake
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _bind_cuda(use: Use) -> Call:
    from forebay.kernels.norms.layer_norm.gpu import bind_layer_norm

    return bind_layer_norm(*(*use.args, *use.out))


def _takes(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Tensors of one dtype, and rows that a GPU's kernel holds."""
    dtypes = {t.dtype for t in (x, weight, bias) if t is not None}
    return dtypes == {x.dtype} and x.dtype in FLOATS and isinstance(x.shape[-1], int) and x.shape[-1] <= MAX_COLUMNS


LAYER_NORM = Operator(
    torch.ops.forebay.layer_norm.default,
    reference,
    each_once,
    bind={"cpu": lambda use: cpu.bind_layer_norm(*(*use.args, *use.out)), "cuda": _bind_cuda},
    workspace={"cpu": cpu.workspace_nbytes},
    takes=_takes,
    layouts={"x": "columns", "weight": "dense", "bias": "dense"},
    onnx=onnx.layer_norm,
)
