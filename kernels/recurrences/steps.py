"""Shared arguments of recurrences: `start` [B], the tokens of each sequence before these, and `count` [B], those here
that are real.

A sequence whose start is 0 begins from a state of zeros, whatever its state holds. Tokens from `count` on leave the
state as it is, and their results are zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

Fail = Callable[[str, str], NoReturn]


def failing(operator: str) -> Fail:
    """Return a function that raises ValueError with the operator and the wrong argument."""
    def fail(argument: str, problem: str) -> NoReturn:
        raise ValueError(f"{operator}: {argument} {problem}")

    return fail


def check(
    fail: Fail, wanted: dict[str, tuple[Any, tuple[int, ...], torch.dtype]], dense: tuple[str, ...],
    columns: tuple[str, ...],
) -> None:
    """Each argument, by its name, against the shape and dtype it must have; those named `dense` must be contiguous, and
    `columns` in their last dimension. None stands for an argument that is left out."""
    for name, (given, shape, dtype) in wanted.items():
        if given is None:
            continue
        if tuple(given.shape) != shape or given.dtype != dtype:
            fail(name, f"must be {dtype} of shape {shape}, got {given.dtype} {tuple(given.shape)}")
        if (name in dense and not given.is_contiguous()) or (
                name in columns and given.shape[-1] > 1 and given.stride(-1) != 1):
            fail(name, f"must be contiguous{'' if name in dense else ' in its last dimension'}, got strides "
                       f"{given.stride()}")


def by_reference(
    reference: Callable[..., tuple[Tensor, Tensor]], given: tuple[Any, ...], state: Tensor, out: Tensor
) -> Callable[[], None]:
    """A closure that fills `out` and renews the state by what the reference makes of the arguments."""
    def run() -> None:
        made, new = reference(*given)
        out.copy_(made)
        state.copy_(new)

    return run


def begun(state: Tensor, start: Tensor) -> Tensor:
    """The state [B, ...] in float64, zeros where a sequence begins."""
    return state.double().masked_fill((start == 0).view(-1, *[1] * (state.dim() - 1)), 0)


def real(count: Tensor, t: int, dim: int) -> Tensor:
    """Return whether token t of each sequence is real, [B, 1, ...] of so many dimensions."""
    return (t < count).view(-1, *[1] * (dim - 1))


def put_real(out: Tensor, t: int, count: Tensor, made: Tensor) -> None:
    """The results of token t, `made`, where it is real: out begins as zeros."""
    out[:, t] = torch.where(real(count, t, made.dim()), made, 0)
