"""Operands of any number of dimensions as the row-major matrices that CPU kernels read and write."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from torch import Tensor


def as_matrix(tensor: Tensor, argument: str, fail: Callable[[str, str], NoReturn]) -> Tensor:
    """tensor as [rows, columns] sharing memory; one that cannot be is refused by `fail(argument, why)`."""
    if tensor.dim() == 0 or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
        fail(argument, f"must have a contiguous last dimension, got shape {tuple(tensor.shape)} and strides "
                       f"{tensor.stride() if tensor.dim() else ()}")
    if tensor.dim() == 2:
        return tensor
    try:
        return tensor.view(-1, tensor.shape[-1]) if tensor.numel() else tensor.new_empty(0, tensor.shape[-1])
    except RuntimeError:
        fail(argument, f"must have leading dimensions of one stride, got strides {tensor.stride()}")


def rows_of(tensor: Tensor) -> Tensor | None:
    """tensor as [rows, columns] sharing memory, or None where its strides do not allow that."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        return None
    try:
        return tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        return None
