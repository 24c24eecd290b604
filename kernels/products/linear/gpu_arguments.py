"""Shared code of the launchers of `linear` and `linear_q`: checked operands as matrices, and the workspace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forebay.kernels.gpu_support.arguments import check_tensor, fail
from forebay.kernels.gpu_support.launches import ALIGN, KernelCall, bound, bound_with_scratch
from forebay.kernels.products.linear import selection
from forebay.kernels.products.linear.gpu_epilogue import ACTIVATIONS
from forebay.kernels.products.linear.joined import MOST_WEIGHTS
from forebay.kernels.products.linear.reference import After
from forebay.kernels.products.linear.selection import HELD_COUNTERS_NBYTES, Grid

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Operands:
    """x [M, K] and what the epilogue reads and writes, [M, N] each but for bias [N]; all share the caller's memory."""

    x: Tensor
    out: Tensor
    bias: Tensor | None
    multiplier: Tensor | None
    residual: Tensor | None
    activation: str
    accumulate: bool

    def arguments(self) -> tuple[Any, ...]:
        """out, bias, multiplier and residual pointers, m, n, and the strides of the three matrices over rows."""
        out, (m, n) = self.out, self.out.shape
        multiplier = out if self.multiplier is None else self.multiplier
        residual = out if self.residual is None else self.residual
        bias = out if self.bias is None else self.bias
        return out, bias, multiplier, residual, m, n, out.stride(0), multiplier.stride(0), residual.stride(0)

    def constants(self) -> dict[str, Any]:
        return {
            "ACTIVATION": self.activation,
            "HAS_BIAS": self.bias is not None,
            "HAS_MULTIPLIER": self.multiplier is not None,
            "HAS_RESIDUAL": self.residual is not None,
            "ACCUMULATE": self.accumulate,
        }


def _matrix(op: str, argument: str, tensor: Tensor) -> Tensor:
    """tensor [..., C] as [R, C] sharing memory; ValueError where its leading dimensions have no one stride."""
    if tensor.dim() == 2:
        return tensor
    if tensor.numel() == 0:
        return tensor.new_empty(0, tensor.shape[-1])
    try:
        return tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        fail(op, argument, f"must have leading dimensions of one stride, got strides {tensor.stride()}")


def prepare(
    op: str,
    x: Tensor,
    n: int,
    k: int,
    bias: Tensor | None,
    after: After,
    out: Tensor | None,
    accumulate: bool,
    dtypes: tuple[torch.dtype, ...] = HALVES,
) -> Operands:
    """Checked operands, x of one of the dtypes; out is made where it is None. ValueError names op and argument."""
    activation, multiplier, residual = after
    if activation not in ACTIVATIONS:
        fail(op, "activation", f"must be one of {ACTIVATIONS}, got {activation!r}")
    check_tensor(op, "x", x, dtype=dtypes)
    if x.dim() == 0 or x.shape[-1] != k:
        fail(op, "x", f"must end in {k} columns as the weight asks, got shape {tuple(x.shape)}")
    shape = (*x.shape[:-1], n)
    for tensor, argument in ((residual, "residual"), (multiplier, "multiplier"), (out, "out")):
        if tensor is not None:
            check_tensor(op, argument, tensor, device=x.device, dtype=x.dtype, shape=shape)
    if bias is not None:
        check_tensor(op, "bias", bias, device=x.device, shape=(n,))
    if accumulate and (out is None or activation):
        fail(op, "accumulate", "needs an out to add to, and no activation")
    made = x.new_empty(shape) if out is None else out
    return Operands(
        _matrix(op, "x", x),
        _matrix(op, "out", made),
        bias,
        None if multiplier is None else _matrix(op, "multiplier", multiplier),
        None if residual is None else _matrix(op, "residual", residual),
        activation,
        accumulate,
    )


class Others(NamedTuple):
    """The weights of a launch beyond its first, with a bias and a result each; with no results a gate's only one."""

    weights: tuple[Tensor, ...] = ()
    biases: tuple[Tensor | None, ...] = ()
    outs: tuple[Tensor, ...] = ()

    def widths(self, n: int) -> tuple[int, ...]:
        """Columns that have tiles of their own, of a first weight with n rows."""
        rows = tuple(weight.shape[0] for weight in self.weights)
        return (n, *rows) if self.outs or not rows else (n + sum(rows),)

    def checked(self, op: str, first: Operands, weight: Tensor) -> Others:
        """The same with results as matrices; ValueError where they do not suit the first."""
        if len(self.weights) >= MOST_WEIGHTS or (self.weights and first.accumulate):
            fail(op, "weight", f"must be {MOST_WEIGHTS} at most, and not accumulate, got {1 + len(self.weights)}")
        if self.weights and not self.outs and (not first.activation or self.weights[0].shape != weight.shape):
            fail(op, "weight", "of a gate must have an activation, and the shape of what it multiplies")
        for other, bias in zip(self.weights, self.biases, strict=True):
            check_tensor(op, "weight", other, device=weight.device, dtype=weight.dtype)
            if other.shape[1:] != weight.shape[1:] or other.stride() != weight.stride():
                fail(op, "weight", f"must all have rows of {weight.shape[1]} columns, {weight.stride(0)} apart")
            if (bias is None) != (first.bias is None):
                fail(op, "bias", "must be of all weights or of none")
            if bias is not None and first.bias is not None:
                check_tensor(op, "bias", bias, device=weight.device, dtype=first.bias.dtype, shape=other.shape[:1])
        outs = tuple(_matrix(op, "out", out) for out in self.outs)
        for out, other in zip(outs, self.weights, strict=False):
            check_tensor(op, "out", out, device=weight.device, dtype=first.out.dtype,
                         shape=(first.out.shape[0], other.shape[0]))
        return self._replace(outs=outs)

    def constants(self, first: Tensor, view: torch.dtype | None = None) -> dict[str, Any]:
        """Arguments of a kernel by name, with weights seen in a dtype; `first` is the first of a launch."""
        if not self.weights:
            return {}
        aligned = not any(weight.data_ptr() % ALIGN for weight in (first, *self.weights))
        found: dict[str, Any] = {"SEGMENTS": 1 + len(self.outs), "GATED": 0 if self.outs else ALIGN if aligned else 1}
        for name, i in (("second", 0), ("third", min(1, len(self.weights) - 1))):  # of two the third is never reached
            weight, bias = self.weights[i], self.biases[i]
            found |= {f"{name}_ptr": weight if view is None else weight.view(view), f"{name}_bias_ptr": bias}
            if self.outs:
                out = self.outs[i]
                found |= {f"{name}_n": weight.shape[0] if i or name == "second" else 0, f"{name}_om": out.stride(0),
                          f"{name}_out_ptr": out, f"{name}_bias_ptr": out if bias is None else bias}
        return found


ALONE = Others()


@functools.cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of a GPU; selection.SM_COUNT for anything else."""
    if device.type != "cuda":
        return selection.SM_COUNT
    return torch.cuda.get_device_properties(device).multi_processor_count


def bind_split(
    op: str, grid: Grid, device: torch.device, given: Tensor | None, launch: Callable[[Tensor, Tensor], KernelCall]
) -> Callable[[], None]:
    """launch(counters int32, partials fp32) as a call without arguments, with what the splits of K need: from `given`,
    or the scratch of the stream.

    given is uint8 of at least grid.workspace_nbytes whose counters, its first bytes, are 0; a launch leaves them 0.
    """
    counters, end = grid.counters_nbytes, grid.workspace_nbytes
    if given is not None:
        check_tensor(op, "workspace", given, device=device, dtype=torch.uint8)
        if given.numel() < end or given.dim() != 1:
            fail(op, "workspace", f"must be {end} bytes in one dimension, got {tuple(given.shape)}")
        return bound(launch(given[:counters].view(torch.int32), given[counters:end].view(torch.float32)))
    if not end:
        nothing = torch.empty(0, device=device)
        return bound(launch(nothing.view(torch.int32), nothing))
    held = max(counters, HELD_COUNTERS_NBYTES)  # rarely more, so that they are rarely made anew
    return bound_with_scratch(
        device, end - counters, held // 4, lambda values, zeros: (launch(zeros, values.view(torch.float32)),)
    )
