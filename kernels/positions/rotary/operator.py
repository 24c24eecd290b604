"""`forebay::rotary`: rotary position embedding of queries or keys (Su et al. 2021), halves turned as Llama does.

out = round(round(x cos) + round(turned sin)), turned = cat(-x[..., D/2:], x[..., :D/2]), equal to the bit to torch's
operators in fp32, bf16 and fp16. The C++ kernel (`rotary.cpp`) reads x once and allocates nothing; without a
compiler, or where D is not contiguous, torch does the work.
"""

from __future__ import annotations

from torch import Tensor

from forebay.kernels.define import define_operator, filling, on_gpu
from forebay.kernels.dense_like import dense_like
from forebay.kernels.operator import each_once
from forebay.kernels.positions.rotary.cpu import bind_rotary
from forebay.kernels.positions.rotary.onnx import rotary as rotary_onnx
from forebay.kernels.positions.rotary.reference import reference


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, S, D], cos and sin [B or 1, S, D], all of any strides -> [B, H, S, D] in x's order of dimensions.

    The result is dense, as of torch.empty_like(x). ValueError names the argument that is wrong.
    """
    return dense_like(x)


ROTARY = define_operator(
    _rotary,
    reference=reference,
    cost=each_once,
    bind={"cpu": filling(bind_rotary), "cuda": on_gpu(f"{__package__}.gpu", "bind_rotary")},
    layouts={"x": "columns", "cos": "columns", "sin": "columns"},
    onnx=rotary_onnx,
)
