"""A Launch as a Python call without arguments: operators looked up and tensors made once, not every step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from forebay.kernels import attention, kv_append, linear, rms_norm, rotary
from forebay.rewriter.program import Launch, TensorRef
from forebay.runtime import gpu_library
from forebay.runtime.device import Call, RuntimeFault

Tensors = Callable[[TensorRef], torch.Tensor]


def bind_launch(launch: Launch, tensor: Tensors) -> Call:
    """The call that runs `launch` on memory given by `tensor`; RuntimeFault if its operator is not known here."""
    args = _tensors(launch.args, tensor)
    kwargs = {k: _tensors(v, tensor) for k, v in launch.kwargs.items()}
    out = [tensor(ref) for ref in launch.out]
    if launch.op == "forebay.linear":
        return _bind_linear(launch, args, kwargs, out[0])
    if launch.op == "forebay.attention":
        q, k, v, start, scale, window, softcap = args
        if q.is_cuda:
            return functools.partial(gpu_library.attention, q, k, v, start, scale, window, softcap, out[0])
        return attention.bind_attention(q, k, v, start, scale, window, softcap, out[0])
    if launch.op == "forebay.kv_append":
        if args[0].is_cuda:
            return functools.partial(gpu_library.kv_append, *args)
        return kv_append.bind_kv_append(*args)
    if launch.op == "forebay.rms_norm":
        x, weight, eps = args
        if x.is_cuda:
            return functools.partial(gpu_library.rms_norm, x, weight, eps, out[0])
        return rms_norm.bind_rms_norm(x, weight, eps, out[0])
    if launch.op == "forebay.rotary":
        x, cos, sin = args
        if x.is_cuda:
            return functools.partial(gpu_library.rotary, x, cos, sin, out[0])
        return rotary.bind_rotary(x, cos, sin, out[0])
    if launch.op == "copy":
        return functools.partial(out[0].copy_, args[0])
    if launch.op.startswith("call:"):
        return _bind_functional(_operator(launch.op[5:], launch), args, kwargs, out)
    return _bind_out_variant(_operator(launch.op, launch), kwargs, out)


# torch's own entry points take 1 us less per call than the operator objects behind them (1.6 against 2.7 for add)
ENTRY_POINTS: dict[str, Any] = {
    "aten.add.out": torch.add, "aten.mul.out": torch.mul, "aten.sub.out": torch.sub, "aten.cat.out": torch.cat,
    "aten.neg.out": torch.neg, "aten.silu.out": torch._C._nn.silu, "aten.gelu.out": torch._C._nn.gelu,
    "aten.rsqrt.out": torch.rsqrt, "aten.mean.out": torch.mean, "aten.pow.Tensor_Scalar_out": torch.pow,
    "aten.cos.out": torch.cos, "aten.sin.out": torch.sin,
}


def _bind_out_variant(op: Any, kwargs: dict[str, Any], out: list[torch.Tensor]) -> Call:
    arguments = op._schema.arguments
    names = [a.name for a in arguments if a.is_out]
    ordered = [kwargs.pop(a.name) for a in arguments if not a.kwarg_only and a.name in kwargs]
    entry = ENTRY_POINTS.get(str(op))
    if entry is not None:
        return functools.partial(entry, *ordered, **kwargs, out=out[0])
    return functools.partial(op, *ordered, **kwargs, **dict(zip(names, out, strict=True)))


def _bind_linear(launch: Launch, args: Any, kwargs: dict[str, Any], out: torch.Tensor) -> Call:
    x, weight, bias = args
    conv1d, accumulate = kwargs["form"] == "kn", kwargs["accumulate"]
    after = linear.After(kwargs.get("activation", ""), kwargs.get("multiplier"), kwargs.get("residual"))
    if x.is_cuda:
        matrix = weight if conv1d else weight.mT
        if after.anything():
            return lambda: out.copy_(linear.finish_(x @ matrix if bias is None else x @ matrix + bias, after))
        return functools.partial(gpu_library.product, x, matrix, bias, out, accumulate)
    k, n = x.shape[-1], out.shape[-1]
    impl = launch.impl or linear.default_choice(weight.dtype, x.numel() // max(1, k), n, k)
    return linear.bind_linear(impl, x, weight, bias, out, accumulate=accumulate, conv1d=conv1d, after=after)


def _bind_functional(op: Any, args: Any, kwargs: dict[str, Any], out: list[torch.Tensor]) -> Call:
    if not out:
        return functools.partial(op, *args, **kwargs)

    def call() -> None:
        result = op(*args, **kwargs)
        for target, value in zip(out, result if isinstance(result, tuple | list) else (result,), strict=True):
            target.copy_(value)

    return call


def _operator(name: str, launch: Launch) -> Any:
    try:
        namespace, packet, overload = name.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (ValueError, AttributeError) as error:
        raise RuntimeFault(f"{launch.label}: the operator {name} is not known to torch {torch.__version__}") from error


def _tensors(value: Any, tensor: Tensors) -> Any:
    if isinstance(value, TensorRef):
        return tensor(value)
    if isinstance(value, tuple | list):
        return type(value)(_tensors(v, tensor) for v in value)
    return value
