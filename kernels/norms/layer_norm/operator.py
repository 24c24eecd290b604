"""`forebay::layer_norm`: layer norm over the last dimension.

out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, rounded once, the variance biased (Ba et al. 2016). fp32, bf16
or fp16, one dtype for all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import layer_norm as torch_layer_norm

from forebay.kernels.norms import onnx
from forebay.kernels.norms.layer_norm.reference import FLOATS, check, reference
from forebay.kernels.norms.rms_norm.reference import MAX_COLUMNS
from forebay.kernels.operator import Call, Operator, Use, each_once, nbytes_of


@torch.library.custom_op("forebay::layer_norm", mutates_args=(), device_types="cpu")
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., H] of any strides -> contiguous [..., H]; ValueError names the argument that is wrong."""
    check(x, weight, bias)
    return torch_layer_norm(x, x.shape[-1:], weight, bias, eps).contiguous()


@layer_norm.register_kernel("cuda")
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    from forebay.kernels.norms.layer_norm.gpu import layer_norm as launch

    out = x.new_empty(x.shape)
    launch(x, weight, bias, eps, out)
    return out


@layer_norm.register_fake
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _bind_cpu(use: Use) -> Call:
    (x, weight, bias, eps), (out,) = use.args, use.out
    check(x, weight, bias)

    def call() -> None:
        out.copy_(torch_layer_norm(x, x.shape[-1:], weight, bias, eps))

    return call


def _bind_cuda(use: Use) -> Call:
    from forebay.kernels.norms.layer_norm.gpu import bind_layer_norm

    return bind_layer_norm(*(*use.args, *use.out))


def _cpu_workspace(use: Use) -> int:
    """The result, made apart, and the mean and deviation of each row in fp32."""
    return nbytes_of(*use.out) + 2 * 4 * math.prod(use.out[0].shape[:-1])


def _takes(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Tensors of one dtype, and rows that a GPU's kernel holds."""
    dtypes = {t.dtype for t in (x, weight, bias) if t is not None}
    return dtypes == {x.dtype} and x.dtype in FLOATS and isinstance(x.shape[-1], int) and x.shape[-1] <= MAX_COLUMNS


LAYER_NORM = Operator(
    torch.ops.forebay.layer_norm.default,
    reference,
    each_once,
    bind={"cpu": _bind_cpu, "cuda": _bind_cuda},
    workspace={"cpu": _cpu_workspace},
    takes=_takes,
    onnx=onnx.layer_norm,
)
