"""`forebay::layer_norm` on the CPU."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import layer_norm as torch_layer_norm

from forebay.kernels.cpu_support import native
from forebay.kernels.cpu_support.matrices import rows_of
from forebay.kernels.norms.layer_norm.reference import check
from forebay.kernels.operator import Use, nbytes_of


class LayerNormArgs(ctypes.Structure):
    """Mirror of `LayerNormArgs` in layer_norm.cpp; strides are in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "x_row", "out_row")),
        ("eps", ctypes.c_float),
        ("dtype", ctypes.c_int32),
    )


def bind_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out: Tensor
) -> Callable[[], None]:
    """A closure that fills out [..., H] from the tensors' present contents; out may be x itself.

    Strides and pointers are settled here; the closure keeps the tensors alive, whose storage must not be resized.
    ValueError names what is wrong. A call costs about 1 µs over the kernel; torch wakes its threads for any rows.
    """
    check(x, weight, bias, out)
    if x.numel() == 0:
        return lambda: None
    library, x2, out2 = native.load(), rows_of(x), rows_of(out)
    plain = all(t is None or t.is_contiguous() for t in (weight, bias))
    if library is None or x2 is None or out2 is None or not plain:

        def by_torch() -> None:
            out.copy_(torch_layer_norm(x, x.shape[-1:], weight, bias, eps))

        return by_torch
    pointers = (None if t is None else t.data_ptr() for t in (x2, weight, bias, out2))
    args = LayerNormArgs(*pointers, *x2.shape, x2.stride(0), out2.stride(0), eps, native.DTYPES[x.dtype])
    return native.NativeCall("layer_norm", args, (x2, weight, bias, out2))


def workspace_nbytes(use: Use) -> int:
    """Return the workspace of torch's operator: the result, made apart, and the mean and deviation of each row in fp32.
    The kernel, present or not, takes none; it is left to torch for strides that it does not know."""
    return nbytes_of(*use.out) + 2 * 4 * math.prod(use.out[0].shape[:-1])
