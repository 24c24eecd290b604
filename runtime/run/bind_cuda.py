"""A Launch of our own operators on a GPU: Triton's launchers with their checks done and their sizes settled."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from forebay.kernels import dequantize_rows, linear
from forebay.rewriter.ir.program import Launch
from forebay.runtime.devices.device import Call, RuntimeFault

HALVES = (torch.float16, torch.bfloat16)


def bind_cuda(launch: Launch, args: Any, kwargs: dict[str, Any], out: list[torch.Tensor]) -> Call | None:
    """The call that runs one of our operators on tensors of a GPU; None for an operator that is not ours.

    RuntimeFault names the launch where Triton cannot be imported, or where a launcher refuses its tensors.
    """
    try:
        return _bind(launch, args, kwargs, out)
    except ValueError as error:
        raise RuntimeFault(f"{launch.label}: {launch.op} does not run on this GPU: {error}") from error


def _bind(launch: Launch, args: Any, kwargs: dict[str, Any], out: list[torch.Tensor]) -> Call | None:
    op = launch.op
    if op == "forebay.linear":
        return _bind_linear(launch, args, kwargs, out[0])
    if op in ("forebay.linear_w4", "forebay.linear_w8"):
        return _bind_packed_linear(launch, args, kwargs, out[0])
    if op == "forebay.dequantize_rows":
        return dequantize_rows.bind_dequantize_rows(*args, out=out[0])
    if op == "forebay.attention":
        q, k, v, start, *rest = args
        if q.shape[2] == 1:
            kernels = _kernels("decode_attention", launch)
            return kernels.bind_decode_attention_contiguous(q[:, :, 0], k, v, start, *rest, out[0][:, 0])
        return _kernels("prefill_attention", launch).bind_prefill_attention(q, k, v, start, *rest, out[0])
    if op == "forebay.attention_q":
        return _kernels("attention_q", launch).bind_attention_q(*args, out[0])
    if op == "forebay.kv_append_q":
        return _kernels("kv_append_q", launch).bind_kv_append_q(*args)
    if op == "forebay.kv_append":
        return _kernels("kv_append", launch).bind_kv_append(*args)
    if op == "forebay.rms_norm":
        return _kernels("rms_norm", launch).bind_rms_norm(*args, out[0])
    if op == "forebay.rotary":
        return _kernels("rotary", launch).bind_rotary(*args, out[0])
    if op == "forebay.swiglu":
        return _kernels("swiglu", launch).bind_swiglu(*args, out[0])
    if op.startswith("forebay."):
        raise ValueError("no kernel of ours takes it there")
    return None


def _kernels(name: str, launch: Launch) -> ModuleType:
    """kernels/gpu/<name>.py, which imports Triton."""
    try:
        return importlib.import_module(f"forebay.kernels.gpu.{name}")
    except ImportError as error:
        raise RuntimeFault(
            f"{launch.label}: {launch.op} on a GPU needs Triton, which cannot be imported ({error}); install the "
            "triton that belongs to this torch (`pip install triton`)"
        ) from error


def _bind_linear(launch: Launch, args: Any, kwargs: dict[str, Any], out: torch.Tensor) -> Call:
    """By the implementation that the plan names, a name of `kernels/gpu/selection.py`; fp32 and "aten" by torch."""
    x, weight, bias = args
    form, accumulate, activation = kwargs["form"], kwargs["accumulate"], kwargs.get("activation", "")
    multiplier, residual = kwargs.get("multiplier"), kwargs.get("residual")
    if launch.impl == "aten" or x.dtype not in HALVES:
        if x.dtype != weight.dtype:
            raise ValueError(f"linear: weight must be of x's dtype {x.dtype}, got {weight.dtype}")
        matrix = weight if form == "kn" else weight.mT
        after = linear.After(activation, multiplier, residual)
        return lambda: _product(x, matrix, bias, out, accumulate, after)
    return _kernels("linear", launch).bind_linear(
        x, weight, bias, residual, activation, out, launch.impl, form, accumulate=accumulate, multiplier=multiplier
    )


def _product(
    x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, accumulate: bool,
    after: linear.After,
) -> None:  # fmt: skip
    """out [..., N] = act(x [..., K] matrix [K, N] + bias) * multiplier + residual, or that added to out."""
    result = linear.finish_(x @ matrix if bias is None else x @ matrix + bias, after)
    if accumulate:
        out.add_(result)
    else:
        out.copy_(result)


def _bind_packed_linear(launch: Launch, args: Any, kwargs: dict[str, Any], out: torch.Tensor) -> Call:
    """As _bind_linear, over packed rows uint8 [N, R]."""
    x, rows, bias = args
    how = (bias, kwargs.get("residual"), kwargs["in_features"], kwargs["group_size"], kwargs.get("activation", ""))
    name = launch.op.removeprefix("forebay.")
    bind = getattr(_kernels(name, launch), f"bind_{name}")
    return bind(x, rows, *how, kwargs["scale_dtype"], out, launch.impl, multiplier=kwargs.get("multiplier"))
