"""The definition of `forebay::linear_q`, and the checks of its arguments."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from forebay.kernels.cpu_support import native
from forebay.kernels.formats import packing
from forebay.kernels.formats.packing import Packing
from forebay.kernels.formats.row_sizes import BITS, product_refusal
from forebay.kernels.products.linear.reference import ACTIVATIONS, PLAIN, After, finish_
from forebay.kernels.quantization.quantize.reference import dequantize_reference


def reference(
    x: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    stored: Packing,
    after: After = PLAIN,
) -> Tensor:
    """The definition in float64, on any device; returns [..., N]."""
    weight = dequantize_reference(*stored.unpack(rows), stored.bits, stored.group_size, 1, stored.in_features,
                                  codebook=stored.codebook)
    y = x.double() @ weight.double().mT
    return finish_(y if bias is None else y + bias.double(), after)


def fail(argument: str, problem: str) -> NoReturn:
    raise ValueError(f"linear_q: {argument} {problem}")


def check(x: Tensor, rows: Tensor, bias: Tensor | None, stored: Packing, after: After) -> None:
    """ValueError names the argument that is wrong; any device."""
    bits, in_features, group_size, scale_dtype, *_ = stored
    if bits not in BITS:
        fail("bits", f"must be one of {BITS}, got {bits}")
    if refusal := product_refusal(in_features, group_size):
        raise ValueError(f"linear_q: {refusal}")
    if scale_dtype not in packing.SCALE_DTYPES:
        fail("scale_dtype", f"must be fp16 or bf16, got {scale_dtype}")
    if x.dtype not in native.DTYPES:
        fail("x", f"must be fp32, bf16 or fp16, got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] != in_features:
        fail("x", f"must end in in_features = {in_features} columns, got shape {tuple(x.shape)}")
    nbytes = stored.row_nbytes
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != nbytes:
        fail("rows", f"must be uint8 [N, {nbytes}] as in_features and group_size ask, got {rows.dtype} "
              f"{tuple(rows.shape)}")  # fmt: skip
    if rows.shape[1] > 1 and rows.stride(1) != 1:
        fail("rows", f"must have contiguous columns, got strides {rows.stride()}")
    n = rows.shape[0]
    if bias is not None and (bias.shape != (n,) or (n > 1 and bias.stride(0) != 1) or bias.dtype not in native.DTYPES):
        fail("bias", f"must be contiguous fp32, bf16 or fp16 {(n,)}, got {bias.dtype} {tuple(bias.shape)}")
    if after.activation not in ACTIVATIONS:
        fail("activation", f"must be one of {ACTIVATIONS}, got {after.activation!r}")
    for tensor, argument in ((rows, "rows"), (bias, "bias"), (after.multiplier, "multiplier"),
                             (after.residual, "residual")):  # fmt: skip
        if tensor is not None and tensor.device != x.device:
            fail(argument, f"must be on x's device {x.device}, got {tensor.device}")
