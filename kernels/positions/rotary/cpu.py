"""`forebay::rotary` on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from torch import Tensor

from forebay.kernels.cpu_support import native
from forebay.kernels.positions.rotary.reference import check, fail, reference


class RotaryArgs(ctypes.Structure):
    """Mirror of `RotaryArgs` in rotary.cpp; strides are in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin", "out")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "queries", "head_dim")),
        *((name, ctypes.c_int64) for name in ("x_batch", "x_head", "x_row")),
        *((f"{table}_{d}", ctypes.c_int64) for table in ("cos", "sin") for d in ("batch", "row")),
        *((name, ctypes.c_int64) for name in ("out_batch", "out_head", "out_row")),
        ("dtype", ctypes.c_int32),
    )


def _table_strides(table: Tensor) -> tuple[int, int]:
    return (table.stride(0) if table.shape[0] > 1 else 0), table.stride(1)


def bind_rotary(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Callable[[], None]:
    """A closure that fills out [B, H, S, D], of any strides, from the present contents of x, cos and sin.

    out must not share memory with the others. Strides and pointers are settled here; the closure keeps the tensors
    alive, whose storage must not be resized. ValueError names what is wrong. A call costs about 1 µs over the kernel.
    """
    check(x, cos, sin, out)
    if x.numel() == 0:
        return lambda: None
    if out.data_ptr() == x.data_ptr():
        fail("out", "must not share x's memory")
    library = native.load()
    if library is None or any(t.stride(-1) != 1 and t.shape[-1] != 1 for t in (x, cos, sin, out)):

        def by_torch() -> None:
            out.copy_(reference(x, cos, sin))

        return by_torch
    args = RotaryArgs(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(),
        *x.shape, *x.stride()[:3], *_table_strides(cos), *_table_strides(sin), *out.stride()[:3],
        native.DTYPES[x.dtype],
    )  # fmt: skip
    return native.NativeCall("rotary", args, (x, cos, sin, out))
