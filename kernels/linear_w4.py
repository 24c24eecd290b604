"""`forebay::linear_w4`: a linear layer whose weight is 4-bit groups, unpacked where it is consumed.

Shapes, rounding and implementations: `quantized_linear`. Weights: `packing` rows, made by `quantize.quantize_rows`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from forebay.kernels import quantized_linear
from forebay.kernels.linear import After

BITS = 4
OP = "linear_w4"


def reference(
    x: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    in_features: int,
    group_size: int,
    activation: str,
    scale_dtype: torch.dtype,
    multiplier: Tensor | None = None,
) -> Tensor:
    """The operator by its definition in float64, on any device."""
    after = After(activation, multiplier, residual)
    return quantized_linear.reference(x, rows, bias, in_features, BITS, group_size, scale_dtype, after)


@torch.library.custom_op("forebay::linear_w4", mutates_args=(), device_types="cpu")
def linear_w4(
    x: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    in_features: int,
    group_size: int,
    activation: str,
    scale_dtype: torch.dtype,
    multiplier: Tensor | None = None,
) -> Tensor:
    """act(x W^T + bias) * multiplier + residual: x [..., K], rows uint8 [N, R] -> contiguous [..., N] of x's dtype.

    in_features is K; bias is [N]; multiplier and residual are [..., N] of x's dtype. ValueError names what is wrong.
    """
    after = After(activation, multiplier, residual)
    return quantized_linear.run_op(OP, BITS, x, rows, bias, in_features, group_size, scale_dtype, after)


@linear_w4.register_fake
def _(
    x: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    in_features: int,
    group_size: int,
    activation: str,
    scale_dtype: torch.dtype,
    multiplier: Tensor | None = None,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows.shape[0])


@linear_w4.register_kernel("cuda")
def _(
    x: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    in_features: int,
    group_size: int,
    activation: str,
    scale_dtype: torch.dtype,
    multiplier: Tensor | None = None,
) -> Tensor:
    after = After(activation, multiplier, residual)
    quantized_linear.check(OP, x, rows, bias, in_features, BITS, group_size, scale_dtype, after)
    from forebay.kernels.gpu import linear_w4 as gpu

    return gpu.linear_w4(
        x, rows, bias, residual, in_features, group_size, activation, scale_dtype, multiplier=multiplier
    )


bind_linear_w4 = functools.partial(quantized_linear.bind, OP, BITS)
implementations = functools.partial(quantized_linear.implementations, BITS)
default_choice = functools.partial(quantized_linear.default_choice, BITS)
measure = functools.partial(quantized_linear.measure, OP, BITS)
scratch_nbytes = quantized_linear.scratch_nbytes
