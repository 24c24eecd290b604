"""`forebay::selective_scan` on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from torch import Tensor

from forebay.kernels.cpu_support import native
from forebay.kernels.recurrences.selective_scan.reference import check_arguments, reference
from forebay.kernels.recurrences.steps import by_reference


class SelectiveScanArgs(ctypes.Structure):
    """Mirror of `SelectiveScanArgs` in selective_scan.cpp; strides are in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "dt", "a", "b", "c", "state", "start", "count", "out")),
        *((name, ctypes.c_int64) for name in ("batch", "tokens", "channels", "width")),
        *((f"{t}_{d}", ctypes.c_int64) for t in ("x", "dt", "out") for d in ("batch", "token", "channel")),
        *((f"{t}_{d}", ctypes.c_int64) for t in ("b", "c") for d in ("batch", "token")),
    )


def bind_selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, start: Tensor, count: Tensor, out: Tensor
) -> Callable[[], object]:
    """A closure that fills out [B, S, C] and renews the state, from the tensors' contents at each call. ValueError
    names what is wrong."""
    check_arguments(x, dt, a, b, c, state, start, count)
    given = (x, dt, a, b, c, state, start, count, out)
    if native.load() is None:
        return by_reference(reference, (x, dt, a, b, c, state, start, count), state, out)
    args = SelectiveScanArgs(*(t.data_ptr() for t in given), *x.shape, a.shape[1], *x.stride(), *dt.stride(),
                             *out.stride(), *b.stride()[:2], *c.stride()[:2])
    return native.NativeCall("selective_scan", args, given)
