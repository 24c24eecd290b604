"""`forebay::rotary`: rotary position embedding of queries or keys (Su et al. 2021), halves turned as Llama does.

out = round(round(x cos) + round(turned sin)), turned = cat(-x[..., D/2:], x[..., :D/2]), equal to the bit to torch's
operators in fp32, bf16 and fp16. The C++ kernel (`rotary.cpp`) reads x once and allocates nothing; without a
compiler, or where D is not contiguous, torch does the work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.dense_like import dense_like
from forebay.kernels.operator import Call, Operator, Use, each_once, in_columns
from forebay.kernels.positions.rotary.cpu import bind_rotary
from forebay.kernels.positions.rotary.onnx import rotary as rotary_onnx
from forebay.kernels.positions.rotary.reference import reference


@torch.library.custom_op("forebay::rotary", mutates_args=(), device_types="cpu")
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, S, D], cos and sin [B or 1, S, D], all of any strides -> [B, H, S, D] in x's order of dimensions.

    The result is dense, as of torch.empty_like(x). ValueError names the argument that is wrong.
    """
    out = torch.empty_like(x)
    bind_rotary(x, cos, sin, out)()
    return out


@rotary.register_kernel("cuda")
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    from forebay.kernels.positions.rotary.gpu import rotary as launch

    x, cos, sin = map(in_columns, (x, cos, sin))
    out = torch.empty_like(x)
    launch(x, cos, sin, out)
    return out


@rotary.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return dense_like(x)


def _bind_cuda(use: Use) -> Call:
    from forebay.kernels.positions.rotary.gpu import bind_rotary as bind

    return bind(*(*use.args, *use.out))


ROTARY = Operator(
    torch.ops.forebay.rotary.default,
    reference,
    each_once,
    bind={"cpu": lambda use: bind_rotary(*(*use.args, *use.out)), "cuda": _bind_cuda},
    layouts={"x": "columns", "cos": "columns", "sin": "columns"},
    onnx=rotary_onnx,
)
