"""Products by torch, cuBLAS on NVIDIA, straight into the given result where that is possible."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from forebay.kernels.operator import Call
from forebay.kernels.products.linear.reference import PLAIN, After, finish_


def bind_by_torch(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor, accumulate: bool, after: After) -> Call:
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
    """Return whether the bytes from the first to the last element of one are among those of the other."""
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
