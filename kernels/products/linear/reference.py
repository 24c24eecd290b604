"""The definition of `forebay::linear`, and the checks of its arguments."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS = ("", "silu", "gelu", "gelu_tanh", "relu")  # in the order of `Activation` in vector_math.h


class After(NamedTuple):
    """The epilogue of a matmul: act, then * multiplier, then + residual, where they are given."""

    activation: str = ""
    multiplier: Tensor | None = None
    residual: Tensor | None = None

    def anything(self) -> bool:
        """Return whether anything follows at all."""
        return bool(self.activation) or self.multiplier is not None or self.residual is not None

    def part(self, rows: slice, columns: slice) -> After:
        """Return the epilogue of a part of the output, for operands that are matrices."""
        return After(self.activation, *(None if t is None else t[rows, columns] for t in self[1:]))


PLAIN = After()


def finish_(y: Tensor, after: After) -> Tensor:
    """Apply `after` to a product in place, each operator rounding to y's dtype; any device."""
    if after.activation == "silu":
        functional.silu(y, inplace=True)
    elif after.activation == "relu":
        y.relu_()
    elif after.activation:
        torch.ops.aten.gelu.out(y, approximate="tanh" if after.activation == "gelu_tanh" else "none", out=y)
    if after.multiplier is not None:
        y.mul_(after.multiplier)
    return y if after.residual is None else y.add_(after.residual)


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, after: After = PLAIN, *, conv1d: bool = False
) -> Tensor:
    """The definition in float64, on any device; returns [..., N]."""
    y = x.double() @ (weight.double() if conv1d else weight.double().mT)
    return finish_(y if bias is None else y + bias.double(), after)


def fail(argument: str, problem: str) -> NoReturn:
    raise ValueError(f"linear: {argument} {problem}")
