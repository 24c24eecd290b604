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
before it writes anything.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional

from forebay.kernels.operator import Call, Cost, Implementations, Operator, Product, Use, nbytes_of
from forebay.kernels.products.linear import choices, cpu
from forebay.kernels.products.linear.cpu import default_choice, run
from forebay.kernels.products.linear.reference import PLAIN, After, finish_, reference


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
    run(impl, x, weight.contiguous(), bias, out, after=after)
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
    """What follows the product, as a launch names it."""
    return After(use.kwargs.get("activation", ""), use.kwargs.get("multiplier"), use.kwargs.get("residual"))


def _shape(use: Use) -> Product:
    x, weight, _ = use.args
    n, k = weight.shape if use.kwargs["form"] == "nk" else reversed(weight.shape)
    return Product(weight.dtype, math.prod(x.shape[:-1]), n, k)


def _cost(use: Use) -> Cost:
    _, m, n, k = _shape(use)
    added = use.out if use.kwargs["accumulate"] else ()
    return Cost(2 * m * n * k, nbytes_of(*use.args, *use.kwargs.values(), *added), nbytes_of(*use.out))


def _bind_cpu(use: Use) -> Call:
    x, weight, bias = use.args
    accumulate, conv1d = use.kwargs["accumulate"], use.kwargs["form"] == "kn"
    return cpu.bind_linear(use.impl, x, weight, bias, use.out[0], accumulate, conv1d, _after(use))


def _bind_cuda(use: Use) -> Call:
    """By the implementation that the plan names, a name of `selection`; fp32 and "aten" by torch."""
    x, weight, bias = use.args
    (out,), form, accumulate, after = use.out, use.kwargs["form"], use.kwargs["accumulate"], _after(use)
    if use.impl == "aten" or x.dtype not in (torch.float16, torch.bfloat16):
        if x.dtype != weight.dtype:
            raise ValueError(f"linear: weight must be of x's dtype {x.dtype}, got {weight.dtype}")
        matrix = weight if form == "kn" else weight.mT
        return _bind_aten(x, matrix, bias, out, accumulate, after)
    from forebay.kernels.products.linear.gpu import bind_linear

    return bind_linear(x, weight, bias, after.residual, after.activation, out, use.impl, form, accumulate=accumulate,
                       multiplier=after.multiplier)  # fmt: skip


def _bind_aten(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor, accumulate: bool, after: After) -> Call:
    """x [..., K] matrix [K, N] and what follows by torch: straight into out where it is a matrix of x's dtype and lies
    apart from what is read after the product; the sum with a residual or with out itself is the product's own."""
    rows = None if out.dtype != x.dtype else _as_matrices(x, out, after.residual)
    more = bias is not None or after.anything()
    if rows is None or (bias is not None and bias.dtype != x.dtype) or (accumulate and more):
        return lambda: _product(x, matrix, bias, out, accumulate, after)
    x2, out2, residual = rows
    alone = residual is not None and bias is None and not after.activation and after.multiplier is None
    same = residual is not None and (residual.data_ptr(), residual.stride()) == (out2.data_ptr(), out2.stride())
    added: Tensor | None
    if accumulate or (alone and same):  # torch's own sum with two tensors of one memory is undefined
        added, after = out2, PLAIN
    elif alone and residual is not None and not _overlap(residual, out):
        added, after = residual, PLAIN
    elif any(t is not None and _overlap(t, out) for t in (after.multiplier, after.residual)):
        return lambda: _product(x, matrix, bias, out, accumulate, after)
    else:
        added = bias
    if added is None:
        multiply = functools.partial(torch.mm, x2, matrix, out=out2)
    else:
        multiply = functools.partial(torch.addmm, added, x2, matrix, out=out2)
    anything = after.anything()

    def run() -> None:
        multiply()
        if anything:
            finish_(out, after)

    return run


def _as_matrices(x: Tensor, out: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """x, out and residual as matrices on the same memory; None where one has no such view."""
    try:
        return (x.view(-1, x.shape[-1]), out.view(-1, out.shape[-1]),
                None if residual is None else residual.view(-1, residual.shape[-1]))
    except RuntimeError:
        return None


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the bytes from the first to the last element of one are among those of the other."""
    (begin_a, end_a), (begin_b, end_b) = _extent(a), _extent(b)
    return begin_a < end_b and begin_b < end_a


def _extent(t: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + t.itemsize * (last + 1)


def _product(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor, accumulate: bool, after: After) -> None:
    """out [..., N] = act(x [..., K] matrix [K, N] + bias) * multiplier + residual, or that added to out."""
    result = finish_(x @ matrix if bias is None else x @ matrix + bias, after)
    if accumulate:
        out.add_(result)
    else:
        out.copy_(result)


def _cpu_workspace(use: Use) -> int:
    weight, m, n, k = _shape(use)
    return cpu.scratch_nbytes(use.impl, getattr(torch, weight), m, n, k)


LINEAR = Operator(
    torch.ops.forebay.linear.default,
    reference,
    _cost,
    bind={"cpu": _bind_cpu, "cuda": _bind_cuda},
    workspace={"cpu": _cpu_workspace, "cuda": lambda use: choices.workspace_nbytes(use.impl, _shape(use))},
    overwrites=("multiplier", "residual"),
    implementations=Implementations(
        _shape,
        candidates=lambda weight: cpu.implementations(getattr(torch, weight)),
        default={"cpu": lambda p, _: default_choice(getattr(torch, p.weight), p.m, p.n, p.k), "cuda": choices.choose},
    ),
    timed_as="product",
)
