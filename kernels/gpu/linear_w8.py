"""`forebay::linear_w8` in Triton: a linear layer over packed rows of 8-bit codes; kernels in `linear_quantized`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forebay.kernels.gpu import linear_quantized, selection
from forebay.kernels.gpu.audit_case import AuditCase

BITS = 8
OP = "linear_w8"


def workspace_nbytes(
    m: int, n: int, k: int, group_size: int, impl: str = "", multiprocessors: int = selection.SM_COUNT
) -> int:
    """Bytes that linear_w8 asks of `workspace` for this shape and implementation; 0 where K is not split."""
    return linear_quantized.plan(OP, m, n, k, group_size, impl, multiprocessors)[2].workspace_nbytes


def bind_linear_w8(
    x: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    in_features: int,
    group_size: int,
    activation: str,
    scale_dtype: torch.dtype,
    out: Tensor,
    impl: str = "",
    *,
    multiplier: Tensor | None = None,
) -> Callable[[], None]:
    """linear_w8 as a call without arguments, on the tensors' contents at each call; the checks are made here."""
    return linear_quantized.bind(
        OP, BITS, x, rows, bias, residual, in_features, group_size, activation, scale_dtype, out, impl, multiplier,
        None,
    )[0]  # fmt: skip


def linear_w8(
    x: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    in_features: int,
    group_size: int,
    activation: str,
    scale_dtype: torch.dtype,
    out: Tensor | None = None,
    impl: str = "",
    *,
    multiplier: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """act(x W^T + bias) * multiplier + residual into out [..., N], or a new tensor.

    x [..., K], residual, multiplier and out are of one dtype, fp16 or bf16; rows uint8 [N, R] hold W in groups of 32,
    64 or 128 along K = in_features. impl is a name of `selection`; "" asks its default table. Weights are rounded to
    x's dtype once, scales to it first. ValueError names what is wrong, before the launch.
    """
    run, result = linear_quantized.bind(
        OP, BITS, x, rows, bias, residual, in_features, group_size, activation, scale_dtype, out, impl, multiplier,
        workspace,
    )  # fmt: skip
    run()
    return result


def audit_cases() -> list[AuditCase]:
    """Every setting and group size at Llama-3-8B's down projection."""
    return linear_quantized.audit_cases_of(OP, BITS, (128,))
