"""`forebay::linear_q`: out = act(x W^T + bias) * multiplier + residual for a W of packed rows of 4 or 8 bits.

    int16   C++, AVX2 or ARM: x rounded to 16-bit integers with one scale per group, exact integer sums. Adds 1.5e-5 of
            a group's largest |x|, 250 times less than a bf16 x has lost already. The default for few rows
    bf16    C++, the bf16 instructions of AVX-512: many rows of x, and the weights that they meet, rounded to bf16, 1.15
            to 1.2 times as fast as int16; few rows as int16. Each is off by up to 0.4 %, the product's norm by some 0.2
            %, as much as it costs to store the result in bf16. x is fp32 or bf16
    int8    the same as int16 with 8 bits, as llama.cpp does; 4-bit weights in groups of 32 or more. Adds 0.4 % of a
            group's largest |x|: some 0.4 % of the product's norm, beside the 10 % that 4-bit weights cost. 1.2 to 1.5
            times faster from 4 rows on
    flat    C++ on any processor: W unpacked to fp32, for many rows of x, whose default
            it is, once in panels (`panels.h`); fp32 sums
    upcast  the same by torch, tile by tile in bounded scratch; needs no compiler

A row of x that integers cannot hold (NaN, infinity, or a group of magnitudes below 1e-30) goes through fp32. Weights
are used as stored, q * scale + low in fp32; the product is rounded to the dtype of out once, and what follows it as in
`linear`. Layout of the rows: `packing`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from forebay.kernels.formats.packing import Packing
from forebay.kernels.formats.table import weight_format
from forebay.kernels.operator import ROUNDED, Call, Cost, Implementations, Operator, Product, Use, dtype_of, nbytes_of
from forebay.kernels.products.linear import choices, joined, selection
from forebay.kernels.products.linear.reference import After
from forebay.kernels.products.linear_q import cpu
from forebay.kernels.products.linear_q.cpu import bind_linear_q, default_choice
from forebay.kernels.products.linear_q.onnx import linear_q as linear_q_onnx
from forebay.kernels.products.linear_q.reference import check, reference


@torch.library.custom_op("forebay::linear_q", mutates_args=(), device_types="cpu")
def linear_q(
    x: Tensor, rows: Tensor, bias: Tensor | None, multiplier: Tensor | None, residual: Tensor | None, activation: str,
    bits: int, in_features: int, group_size: int, scale_dtype: torch.dtype, symmetric: bool = False,
    codebook: str = "",
) -> Tensor:  # fmt: skip
    """act(x W^T + bias) * multiplier + residual: x [..., K], rows uint8 [N, R] -> contiguous [..., N] of x's dtype.

    in_features is K; bias is [N]; multiplier and residual are [..., N] of x's dtype. ValueError names what is wrong.
    """
    after = After(activation, *(None if t is None else t.contiguous() for t in (multiplier, residual)))
    out = x.new_empty(*x.shape[:-1], rows.shape[0])
    impl = default_choice(bits, x.numel() // max(1, in_features), group_size, codebook)
    stored = Packing(bits, in_features, group_size, scale_dtype, symmetric, codebook)
    bias = None if bias is None else bias.contiguous()
    bind_linear_q(impl, x.contiguous(), rows.contiguous(), bias, out, stored, after)()
    return out


@linear_q.register_fake
def _(x: Tensor, rows: Tensor, *others: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows.shape[0])


@linear_q.register_kernel("cuda")
def _(
    x: Tensor, rows: Tensor, bias: Tensor | None, multiplier: Tensor | None, residual: Tensor | None, activation: str,
    *packing: Any,
) -> Tensor:
    stored, after = Packing(*packing), After(activation, multiplier, residual)
    check(x, rows, bias, stored, after)
    from forebay.kernels.products.linear_q import gpu

    return gpu.linear_q(x, rows, bias, stored, after)


def _stored(use: Use) -> Packing:
    return Packing(**{name: use.kwargs[name] for name in Packing._fields if name in use.kwargs})


def _after(use: Use) -> After:
    """Return the epilogue of the matmul, by a launch's arguments."""
    return After(use.kwargs.get("activation", ""), use.kwargs.get("multiplier"), use.kwargs.get("residual"))


def _shape(use: Use) -> Product:
    stored, n = _stored(use), sum(rows.shape[0] for rows in joined.weights_of(use))
    return Product(stored.format, math.prod(use.args[0].shape[:-1]), n, stored.in_features)


def _cost(use: Use) -> Cost:
    _, m, n, k = _shape(use)
    return Cost(2 * m * n * k, nbytes_of(*use.args, *use.kwargs.values()), nbytes_of(*use.out))


def _bind_cpu(use: Use) -> Call:
    if len(joined.weights_of(use)) > 1:
        return joined.one_by_one(_bind_cpu, use)
    x, rows, bias = use.args
    return cpu.bind_linear_q(use.impl, x, rows, bias, use.out[0], _stored(use), _after(use))


def _bind_cuda(use: Use) -> Call:
    from forebay.kernels.products.linear_q.gpu import bind_joined, bind_linear_q

    x, rows, bias = use.args
    if len(joined.weights_of(use)) > 1:
        coded = _stored(use).codebook and not use.impl.startswith(selection.RAW)
        if use.impl == selection.ATEN or x.dtype == torch.float32 or coded:
            return joined.one_by_one(_bind_cuda, use)
        return bind_joined(use, _stored(use), _after(use))
    return bind_linear_q(x, rows, bias, _stored(use), _after(use), use.out[0], use.impl)


def _cpu_workspace(use: Use) -> int:
    _, m, n, k = _shape(use)
    return cpu.scratch_nbytes(use.impl, dtype_of(use.args[0]), m, n, k, _stored(use).group_size, _stored(use).codebook)


def _on_cuda(use: Use) -> tuple[str, Product, int]:
    """Implementation, product and bytes of an element of x."""
    return use.impl, _shape(use), dtype_of(use.args[0]).itemsize


def _default_choice(product: Product) -> str:
    stored = weight_format(product.weight)
    return default_choice(stored.bits, product.m, stored.group_size, stored.codebook)


def _candidates(weight: str) -> tuple[str, ...]:
    """Return the implementations that keep the accuracy of floats."""
    stored = weight_format(weight)
    return tuple(name for name in cpu.implementations(stored.bits, stored.codebook) if name not in ROUNDED)


def _rounding(shape: Product, activations: str) -> tuple[str, ...]:
    """Return the rounding: for few rows bf16 becomes int16; int8 takes only some groups."""
    stored = weight_format(shape.weight)
    if activations not in cpu.implementations(stored.bits, stored.codebook) or activations not in ROUNDED:
        return ()
    takes = shape.m > cpu.FEW_ROWS if activations == "bf16" else cpu.takes_int8(stored.bits, stored.group_size)
    return (activations,) if takes else ()


LINEAR_Q = Operator(
    torch.ops.forebay.linear_q.default,
    reference,
    _cost,
    bind={"cpu": _bind_cpu, "cuda": _bind_cuda},
    workspace={"cpu": _cpu_workspace, "cuda": lambda use: choices.workspace_nbytes(
        *_on_cuda(use), joined.widths(use))},
    allocator_transient_nbytes=lambda use: choices.transient_nbytes(*_on_cuda(use)),
    overwrites=("multiplier", "residual"),
    layouts={"x": "rows", "rows": "rows", "bias": "dense", "multiplier": "rows", "residual": "rows"},
    implementations=Implementations(
        _shape,
        candidates=_candidates,
        default={"cpu": lambda p, *_: _default_choice(p), "cuda": choices.choose},
        rounding=_rounding,
        joins=lambda impl: impl != selection.ATEN,
    ),
    timed_as="product",
    onnx=linear_q_onnx,
)
