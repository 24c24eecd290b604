"""`forebay::rms_norm`: root-mean-square norm with a weight, rounded as Llama's.

y = round(x rsqrt(mean(x^2) + eps)) and out = round(weight y), the mean in fp32 over the last dimension (Zhang and
Sennrich 2019). x, weight and out are of one dtype: fp32, bf16 or fp16. The C++ kernel (`cpu/rows.cpp`) reads x twice
and allocates nothing; without a compiler, or for strides that it does not know, torch does the work.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forebay.kernels import native


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The definition by torch, on any device: x [..., H] and weight [H] -> [..., H] of x's dtype."""
    wide = x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def _fail(argument: str, problem: str) -> None:
    raise ValueError(f"rms_norm: {argument} {problem}")


def check(x: Tensor, weight: Tensor, out: Tensor | None = None) -> None:
    """ValueError names the argument whose shape, dtype or device is wrong."""
    for tensor, name in ((x, "x"), (weight, "weight"), (out, "out")):
        if tensor is None:
            continue
        if tensor.dtype not in native.DTYPES or tensor.dtype != x.dtype:
            _fail(name, f"must be fp32, bf16 or fp16 and of x's dtype {x.dtype}, got {tensor.dtype}")
        if tensor.device.type != "cpu":
            _fail(name, f"must be on the CPU, got {tensor.device}")
    if x.dim() == 0:
        _fail("x", "must have at least one dimension")
    if weight.shape != x.shape[-1:]:
        _fail("weight", f"must have shape {tuple(x.shape[-1:])} as x asks, got {tuple(weight.shape)}")
    if out is not None and out.shape != x.shape:
        _fail("out", f"must have x's shape {tuple(x.shape)}, got {tuple(out.shape)}")


def _rows(tensor: Tensor) -> Tensor | None:
    """tensor as [rows, columns] sharing memory, or None where its strides do not allow that."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        return None
    try:
        return tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        return None


def bind_rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Callable[[], None]:
    """A closure that fills out [..., H] from the tensors' present contents; out may be x itself.

    Strides and pointers are settled here; the closure keeps the tensors alive, whose storage must not be resized.
    ValueError names what is wrong. A call costs about 1 µs over the kernel.
    """
    check(x, weight, out)
    if x.numel() == 0:
        return lambda: None
    library, x2, out2 = native.load(), _rows(x), _rows(out)
    if library is None or x2 is None or out2 is None or not weight.is_contiguous():

        def by_torch() -> None:
            out.copy_(reference(x, weight, eps))

        return by_torch
    args = native.RmsNormArgs(
        x2.data_ptr(), weight.data_ptr(), out2.data_ptr(),
        *x2.shape, x2.stride(0), out2.stride(0), eps, native.DTYPES[x.dtype],
    )  # fmt: skip
    return native.NativeCall("rms_norm", args, (x2, weight, out2))


@torch.library.custom_op("forebay::rms_norm", mutates_args=(), device_types="cpu")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] of any strides, weight [H] -> contiguous [..., H]; ValueError names the argument that is wrong."""
    out = x.new_empty(x.shape)
    bind_rms_norm(x, weight, eps, out)()
    return out


@rms_norm.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from forebay.kernels.gpu.rms_norm import rms_norm as launch

    out = x.new_empty(x.shape)
    launch(x, weight, eps, out)
    return out


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)
