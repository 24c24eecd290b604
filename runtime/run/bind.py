"""A Launch as a Python call without arguments: operators looked up and tensors made once, not every step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from forebay.kernels import operators
from forebay.kernels.operator import Operator, Tensors
from forebay.rewriter.ir.operator_names import is_called, overload_of
from forebay.rewriter.ir.program import COLLECT, Launch, TensorRef
from forebay.runtime.devices.cuda.kind import CUDA
from forebay.runtime.devices.device import Call, RuntimeFault
from forebay.runtime.devices.kinds import HOST

aten = torch.ops.aten
TensorOf = Callable[[TensorRef], torch.Tensor]

TITLES = {kind.kernels: kind.title for kind in (HOST, CUDA)}  # by the key of operators' bindings


def bind_launch(launch: Launch, tensor: TensorOf) -> Call:
    """The call that runs `launch` on memory given by `tensor`; RuntimeFault if its operator is not known here."""
    args = _tensors(launch.args, tensor)
    kwargs = {k: _tensors(v, tensor) for k, v in launch.kwargs.items()}
    out = [tensor(ref) for ref in launch.out]
    operator = operators.find(launch.op)
    if operator is not None:
        use = Tensors(args, kwargs, tuple(out), launch.impl)
        return bind_operator(operator, launch, use, _kernels_for(*out, *args))
    if launch.stream == COLLECT:
        from forebay.runtime.comm.collectives import bind_collective

        return bind_collective(launch, args, out[0] if out else args[0])
    if launch.op == "copy":
        return functools.partial(out[0].copy_, args[0])
    torchs = overload_of(launch.op)
    if torchs is None:
        raise RuntimeFault(f"{launch.label}: the operator {launch.op} is not known to torch {torch.__version__}")
    if is_called(launch.op):
        return _bind_functional(torchs, args, kwargs, out)
    return _bind_out_variant(torchs, kwargs, out)


# torch's own entry points take 1 us less per call than the operator objects behind them (1.6 against 2.7 for add)
ENTRY_POINTS: dict[torch._ops.OpOverload, Callable[..., torch.Tensor]] = {
    aten.add.out: torch.add, aten.mul.out: torch.mul, aten.sub.out: torch.sub, aten.cat.out: torch.cat,
    aten.neg.out: torch.neg, aten.silu.out: torch._C._nn.silu, aten.gelu.out: torch._C._nn.gelu,
    aten.rsqrt.out: torch.rsqrt, aten.mean.out: torch.mean, aten.pow.Tensor_Scalar_out: torch.pow,
    aten.cos.out: torch.cos, aten.sin.out: torch.sin,
}


def _bind_out_variant(op: Any, kwargs: dict[str, Any], out: list[torch.Tensor]) -> Call:
    arguments = op._schema.arguments
    names = [a.name for a in arguments if a.is_out]
    ordered = [kwargs.pop(a.name) for a in arguments if not a.kwarg_only and a.name in kwargs]
    entry = ENTRY_POINTS.get(op)
    if entry is not None:
        return functools.partial(entry, *ordered, **kwargs, out=out[0])
    return functools.partial(op, *ordered, **kwargs, **dict(zip(names, out, strict=True)))


def bind_operator(operator: Operator, launch: Launch, use: Tensors, kernels: str) -> Call:
    """The call of one of our own operators from the bindings `kernels`; RuntimeFault names the launch where it does
    not say which of several implementations runs, where Triton cannot be imported, or where the launcher refuses its
    tensors."""
    if operator.implementations is not None and not use.impl:
        raise RuntimeFault(f"{launch.label}: {launch.op} names none of its implementations; lower a plan whose gemm "
                           "has this matmul")
    bind = operator.bind.get(kernels)
    if bind is None:
        raise RuntimeFault(f"{launch.label}: {launch.op} has no kernel for a {TITLES.get(kernels, kernels)}")
    try:
        return bind(use)
    except ImportError as error:
        raise RuntimeFault(
            f"{launch.label}: {launch.op} on a GPU needs Triton, which cannot be imported ({error}); install the "
            "triton that belongs to this torch (`pip install triton`)"
        ) from error
    except ValueError as error:
        raise RuntimeFault(f"{launch.label}: {launch.op} does not run on this {TITLES.get(kernels, kernels)}: {error}"
                           ) from error


def _kernels_for(*values: Any) -> str:
    """The bindings for tensors as they lie: those of the first that host cores do not reach."""
    types = {value.device.type for value in values if isinstance(value, torch.Tensor)}
    return next(iter(types - {HOST.kernels}), HOST.kernels)


def _bind_functional(op: Any, args: Any, kwargs: dict[str, Any], out: list[torch.Tensor]) -> Call:
    if not out:
        return functools.partial(op, *args, **kwargs)

    def call() -> None:
        result = op(*args, **kwargs)
        for target, value in zip(out, result if isinstance(result, tuple | list) else (result,), strict=True):
            target.copy_(value)

    return call


def _tensors(value: Any, tensor: TensorOf) -> Any:
    if isinstance(value, TensorRef):
        return tensor(value)
    if isinstance(value, tuple | list):
        return type(value)(_tensors(v, tensor) for v in value)
    return value
