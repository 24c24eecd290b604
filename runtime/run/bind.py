"""A Launch as a Python call without arguments: operators looked up and tensors made once, not every step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from forebay.kernels import (
    attention,
    attention_q,
    dequantize_rows,
    kv_append,
    kv_append_q,
    linear,
    linear_w4,
    linear_w8,
    rms_norm,
    rotary,
)
from forebay.rewriter.ir.program import Launch, TensorRef
from forebay.runtime.devices.device import Call, RuntimeFault
from forebay.runtime.run.bind_cuda import bind_cuda

Tensors = Callable[[TensorRef], torch.Tensor]


def bind_launch(launch: Launch, tensor: Tensors) -> Call:
    """The call that runs `launch` on memory given by `tensor`; RuntimeFault if its operator is not known here."""
    args = _tensors(launch.args, tensor)
    kwargs = {k: _tensors(v, tensor) for k, v in launch.kwargs.items()}
    out = [tensor(ref) for ref in launch.out]
    if any(isinstance(t, torch.Tensor) and t.is_cuda for t in (*out, *args)):
        call = bind_cuda(launch, args, kwargs, out)
        if call is not None:
            return call
    if launch.op == "forebay.linear":
        return _bind_linear(launch, args, kwargs, out[0])
    if launch.op in ("forebay.linear_w4", "forebay.linear_w8"):
        return _bind_packed_linear(launch, args, kwargs, out[0])
    if launch.op == "forebay.dequantize_rows":
        return dequantize_rows.bind_dequantize_rows(*args, out=out[0])
    if launch.op == "forebay.attention":
        q, k, v, start, scale, window, softcap = args
        return attention.bind_attention(q, k, v, start, scale, window, softcap, out[0])
    if launch.op == "forebay.kv_append_q":
        return kv_append_q.bind_kv_append_q(*args)
    if launch.op == "forebay.attention_q":
        q, k, v, start, scale, window, softcap, bits, group = args
        return attention_q.bind_attention_q(q, k, v, start, scale, window, softcap, bits, group, out[0])
    if launch.op == "forebay.kv_append":
        return kv_append.bind_kv_append(*args)
    if launch.op == "forebay.rms_norm":
        x, weight, eps = args
        return rms_norm.bind_rms_norm(x, weight, eps, out[0])
    if launch.op == "forebay.rotary":
        x, cos, sin = args
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
    k, n = x.shape[-1], out.shape[-1]
    impl = launch.impl or linear.default_choice(weight.dtype, x.numel() // max(1, k), n, k)
    return linear.bind_linear(impl, x, weight, bias, out, accumulate=accumulate, conv1d=conv1d, after=after)


def _bind_packed_linear(launch: Launch, args: Any, kwargs: dict[str, Any], out: torch.Tensor) -> Call:
    x, rows, bias = args
    after = linear.After(kwargs.get("activation", ""), kwargs.get("multiplier"), kwargs.get("residual"))
    op = linear_w4 if launch.op == "forebay.linear_w4" else linear_w8
    in_features, group_size, scale_dtype = (kwargs[name] for name in ("in_features", "group_size", "scale_dtype"))
    impl = launch.impl or op.default_choice(x.numel() // max(1, in_features))
    bind = linear_w4.bind_linear_w4 if op is linear_w4 else linear_w8.bind_linear_w8
    return bind(impl, x, rows, bias, out, in_features, group_size, scale_dtype, after)


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
