"""`forebay::rms_norm` on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from torch import Tensor

from forebay.kernels.cpu_support import native
from forebay.kernels.cpu_support.matrices import rows_of
from forebay.kernels.norms.rms_norm.reference import check, reference


class RmsNormArgs(ctypes.Structure):
    """Mirror of `RmsNormArgs` in rms_norm.cpp; strides are in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "x_row", "out_row")),
        ("eps", ctypes.c_float),
        ("dtype", ctypes.c_int32),
    )


def bind_rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Callable[[], None]:
    """A closure that fills out [..., H] from the tensors' present contents; out may be x itself.

    Strides and pointers are settled here; the closure keeps the tensors alive, whose storage must not be resized.
    ValueError names what is wrong. A call costs about 1 µs over the kernel.
    """
    check(x, weight, out)
    if x.numel() == 0:
        return lambda: None
    library, x2, out2 = native.load(), rows_of(x), rows_of(out)
    if library is None or x2 is None or out2 is None or not weight.is_contiguous():

        def by_torch() -> None:
            out.copy_(reference(x, weight, eps))

        return by_torch
    args = RmsNormArgs(
        x2.data_ptr(), weight.data_ptr(), out2.data_ptr(),
        *x2.shape, x2.stride(0), out2.stride(0), eps, native.DTYPES[x.dtype],
    )  # fmt: skip
    return native.NativeCall("rms_norm", args, (x2, weight, out2))
