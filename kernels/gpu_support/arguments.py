"""Checks of tensors in every launcher of this folder; failures are ValueErrors that name op and argument."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NoReturn

import torch
import triton
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def fail(op: str, argument: str, problem: str) -> NoReturn:
    """ValueError of the one form that the project uses."""
    raise ValueError(f"{op}: {argument} {problem}")


def check_device(op: str, argument: str, tensor: Tensor, device: torch.device | None = None) -> None:
    """The tensor is on a GPU (on any device under TRITON_INTERPRET=1), and on `device` if one is given."""
    if device is not None and tensor.device != device:
        fail(op, argument, f"must be on {device}, got {tensor.device}")
    if tensor.device.type != "cuda" and not triton.knobs.runtime.interpret:
        fail(op, argument, f"must be on a GPU, got {tensor.device}")


def check_tensor(
    op: str,
    argument: str,
    tensor: Tensor,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | Sequence[torch.dtype] = FLOATS,
    shape: Sequence[int] | None = None,
) -> None:
    """The tensor has one of these dtypes, this shape, this device, and a contiguous last dimension."""
    check_device(op, argument, tensor, device)
    allowed = (dtype,) if isinstance(dtype, torch.dtype) else dtype
    if tensor.dtype not in allowed:
        fail(op, argument, f"must be of {' or '.join(map(str, allowed))}, got {tensor.dtype}")
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        fail(op, argument, f"must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        fail(op, argument, f"must have a contiguous last dimension, got strides {tensor.stride()}")


AMD_STAGES = 2


def stages(wanted: int) -> int:
    """Pipeline stages that a launch takes of those wanted: on AMD two, as a block has 64 KiB of shared memory there."""
    return min(wanted, AMD_STAGES) if torch.version.hip else wanted


@functools.cache
def before_hopper(device: torch.device) -> bool:
    """Return whether a GPU multiplies matrices in registers (mma), which hold less than Hopper's products of shared
    memory."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device)[0] < 9


def leading_dimensions(op: str, x: Tensor, out: Tensor) -> tuple[list[int], list[int], list[int]]:
    """Sizes and the strides in x and in out of three dimensions that stand for all but the last of two equal shapes.

    Dimensions that lie one after the other in both tensors are joined; ValueError where more than three are left.
    """
    sizes: list[int] = []
    strides: list[list[int]] = [[], []]
    for size, *stride in zip(x.shape[:-1], x.stride()[:-1], out.stride()[:-1], strict=True):
        if size == 1:
            continue
        if sizes and all(held[-1] == size * step for held, step in zip(strides, stride, strict=True)):
            sizes[-1] *= size
            for held, step in zip(strides, stride, strict=True):
                held[-1] = step
        else:
            sizes.append(size)
            for held, step in zip(strides, stride, strict=True):
                held.append(step)
    if len(sizes) > 3:
        fail(op, "x", f"has strides {x.stride()} that leave more than three separate dimensions over its rows")
    pad = 3 - len(sizes)
    return [1] * pad + sizes, [0] * pad + strides[0], [0] * pad + strides[1]
