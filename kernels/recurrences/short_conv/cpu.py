"""`forebay::short_conv` on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from torch import Tensor

from forebay.kernels.cpu_support import native
from forebay.kernels.recurrences.short_conv.reference import ACTIVATIONS, check_arguments, reference
from forebay.kernels.recurrences.steps import by_reference


class ShortConvArgs(ctypes.Structure):
    """Mirror of `ShortConvArgs` in short_conv.cpp; strides are in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "state", "start", "count", "out")),
        *((name, ctypes.c_int64) for name in ("batch", "tokens", "channels", "taps")),
        *((name, ctypes.c_int64) for name in ("x_batch", "x_token", "out_batch", "out_token")),
        *((name, ctypes.c_int32) for name in ("dtype", "activation")),
    )


def bind_short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, start: Tensor, count: Tensor, activation: str,
    out: Tensor,
) -> Callable[[], object]:
    """A closure that fills out [B, S, C] and renews the state, from the tensors' contents at each call. ValueError
    names what is wrong."""
    check_arguments(x, weight, bias, state, start, count, activation)
    given = (x, weight, bias, state, start, count, out)
    if native.load() is None or (out.shape[-1] > 1 and out.stride(-1) != 1):
        return by_reference(reference, (x, weight, bias, state, start, count, activation), state, out)
    args = ShortConvArgs(*(None if t is None else t.data_ptr() for t in given), *x.shape, weight.shape[1],
                         *x.stride()[:2], *out.stride()[:2], native.DTYPES[x.dtype], ACTIVATIONS.index(activation))
    return native.NativeCall("short_conv", args, given)
