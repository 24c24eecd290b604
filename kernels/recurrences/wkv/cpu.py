"""`forebay::wkv` on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from torch import Tensor

from forebay.kernels.cpu_support import native
from forebay.kernels.recurrences.steps import by_reference
from forebay.kernels.recurrences.wkv.reference import check_arguments, reference


class WkvArgs(ctypes.Structure):
    """Mirror of `WkvArgs` in wkv.cpp; strides are in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k", "v", "log_decay", "bonus", "state", "start", "count", "out")),
        *((name, ctypes.c_int64) for name in ("batch", "tokens", "channels")),
        *((f"{t}_{d}", ctypes.c_int64) for t in ("k", "v", "out") for d in ("batch", "token")),
    )


def bind_wkv(
    k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, state: Tensor, start: Tensor, count: Tensor, out: Tensor
) -> Callable[[], object]:
    """A closure that fills out [B, S, C] and renews the state, from the tensors' contents at each call. ValueError
    names what is wrong."""
    check_arguments(k, v, log_decay, bonus, state, start, count)
    given = (k, v, log_decay, bonus, state, start, count, out)
    if native.load() is None or (out.shape[-1] > 1 and out.stride(-1) != 1):
        return by_reference(reference, (k, v, log_decay, bonus, state, start, count), state, out)
    args = WkvArgs(*(t.data_ptr() for t in given), *k.shape, *k.stride()[:2], *v.stride()[:2], *out.stride()[:2])
    return native.NativeCall("wkv", args, given)
