"""`forebay::linear`: out = act(x W^T + b) * multiplier + residual (or x W, GPT-2's Conv1D), by several implementations.

    aten    torch's matmul; x and weight of one dtype
    flat    C++ (`linear.cpp`): each weight is read from memory once per 64 rows of x, upcast in registers
    upcast  tiles of weight upcast to fp32 in a bounded scratch, then sgemm; for bf16 and fp16 weights and many rows

Shapes: x [..., K]; weight [N, K], or [K, N] with conv1d; bias [N] or None; out, multiplier and residual [..., N]. Only
the last dimension must be contiguous: out may be a column slice of a wider tensor. Weights may start at any address.
dtypes: fp32, bf16, fp16, mixed at will but for aten; multiplier and residual have out's. With accumulate the product
is added to what out holds, as row tiles of a [K, N] weight need. What follows the product rounds as operators apart
would: product, activation, multiplication and addition each to out's dtype. out may be the memory of multiplier or of
residual, element on element, unless that is x's memory too. Every launcher raises ValueError naming op and argument
before it writes anything. A launch may have several weights (`joined`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from forebay.kernels.operator import Call, Cost, Implementations, Operator, Product, Use, nbytes_of
from forebay.kernels.products.linear import choices, cpu, joined, selection
from forebay.kernels.products.linear.by_torch import bind_by_torch
from forebay.kernels.products.linear.cpu import default_choice, run
from forebay.kernels.products.linear.onnx import linear as linear_onnx
from forebay.kernels.products.linear.reference import After, finish_, reference


@torch.library.custom_op("forebay::linear", mutates_args=(), device_types="cpu")
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, multiplier: Tensor | None = None,
    residual: Tensor | None = None, activation: str = "",
) -> Tensor:
    """act(x W^T + bias) * multiplier + residual: x [..., K], weight [N, K] -> contiguous [..., N] of x's dtype.

    multiplier and residual are [..., N] of x's dtype. ValueError names the argument that is wrong.
    """
    after = After(activation, *(None if t is None else t.contiguous() for t in (multiplier, residual)))
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    x = x.contiguous()
    impl = default_choice(weight.dtype, x.numel() // max(1, x.shape[-1]), *weight.shape)
    run(impl, x, weight.contiguous(), None if bias is None else bias.contiguous(), out, after=after)
    return out


@linear.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, multiplier: Tensor | None = None,
    residual: Tensor | None = None, activation: str = "",
) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@linear.register_kernel("cuda")
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, multiplier: Tensor | None = None,
    residual: Tensor | None = None, activation: str = "",
) -> Tensor:
    return finish_(functional.linear(x, weight, bias), After(activation, multiplier, residual))


def _after(use: Use) -> After:
    """Return the epilogue of the matmul, by a launch's arguments."""
    return After(use.kwargs.get("activation", ""), use.kwargs.get("multiplier"), use.kwargs.get("residual"))


def _shape(use: Use) -> Product:
    x, weights = use.args[0], joined.weights_of(use)
    n, k = weights[0].shape if use.kwargs["form"] == "nk" else reversed(weights[0].shape)
    return Product(weights[0].dtype, math.prod(x.shape[:-1]), n + sum(w.shape[0] for w in weights[1:]), k)


def _cost(use: Use) -> Cost:
    _, m, n, k = _shape(use)
    added = use.out if use.kwargs["accumulate"] else ()
    return Cost(2 * m * n * k, nbytes_of(*use.args, *use.kwargs.values(), *added), nbytes_of(*use.out))


def _bind_cpu(use: Use) -> Call:
    if len(joined.weights_of(use)) > 1:
        return joined.one_by_one(_bind_cpu, use)
    x, weight, bias = use.args
    accumulate, conv1d = use.kwargs["accumulate"], use.kwargs["form"] == "kn"
    return cpu.bind_linear(use.impl, x, weight, bias, use.out[0], accumulate, conv1d, _after(use))


def _bind_cuda(use: Use) -> Call:
    """By the implementation that the plan names, a name of `selection`; fp32 and "aten" by torch."""
    x, weight, bias = use.args
    by_torch = use.impl == selection.ATEN or x.dtype not in (torch.float16, torch.bfloat16)
    if len(joined.weights_of(use)) > 1:
        if by_torch:
            return joined.one_by_one(_bind_cuda, use)
        from forebay.kernels.products.linear.gpu import bind_joined

        return bind_joined(use, _after(use))
    (out,), form, accumulate, after = use.out, use.kwargs["form"], use.kwargs["accumulate"], _after(use)
    if by_torch:
        if x.dtype != weight.dtype:
            raise ValueError(f"linear: weight must be of x's dtype {x.dtype}, got {weight.dtype}")
        matrix = weight if form == "kn" else weight.mT
        return bind_by_torch(x, matrix, bias, out, accumulate, after)
    from forebay.kernels.products.linear.gpu import bind_linear

    return bind_linear(x, weight, bias, after, out, use.impl, form, accumulate=accumulate)


def _cpu_workspace(use: Use) -> int:
    weight, m, n, k = _shape(use)
    return cpu.scratch_nbytes(use.impl, getattr(torch, weight), m, n, k, use.kwargs["form"] == "kn")


LINEAR = Operator(
    torch.ops.forebay.linear.default,
    reference,
    _cost,
    bind={"cpu": _bind_cpu, "cuda": _bind_cuda},
    workspace={"cpu": _cpu_workspace, "cuda": lambda use: choices.workspace_nbytes(
        use.impl, _shape(use), widths=joined.widths(use))},
    allocator_transient_nbytes=lambda use: choices.transient_nbytes(use.impl, _shape(use)),
    overwrites=("multiplier", "residual"),
    layouts={"x": "rows", "weight": "rows", "bias": "dense", "multiplier": "rows", "residual": "rows"},
    implementations=Implementations(
        _shape,
        candidates=lambda weight: cpu.implementations(getattr(torch, weight)),
        default={"cpu": lambda p, *_: default_choice(getattr(torch, p.weight), p.m, p.n, p.k), "cuda": choices.choose},
        joins=lambda impl: impl != selection.ATEN,
    ),
    timed_as="product",
    onnx=linear_onnx,
)
