"""`linear_q` of many rows of x: weights are dequantized once, into scratch, and torch multiplies (cuBLAS on NVIDIA).

A weight of packed rows is written and read once more, in x's dtype: in 16 bits that costs less than unpacking it anew
for every tile of rows of x from some 256 of them on, and for x in fp32 it is the only way.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from forebay.kernels.formats.packing import Packing
from forebay.kernels.gpu_support.launches import KernelCall, bound_with_scratch
from forebay.kernels.operator import Call
from forebay.kernels.products.linear.by_torch import bind_by_torch
from forebay.kernels.products.linear.choices import dequantized_rows
from forebay.kernels.products.linear.reference import After
from forebay.kernels.quantization.dequantize_rows.gpu import dequantize_call


def bind_dequantized(
    x: Tensor, rows: Tensor, bias: Tensor | None, stored: Packing, after: After, out: Tensor
) -> Callable[[], None]:
    """act(x W^T + bias) * multiplier + residual into out [..., N] as a call without arguments, of arguments that have
    been checked; x [..., K], rows uint8 [N, R]. Tiles of W's rows give columns of out."""
    n, k = rows.shape[0], stored.in_features
    each = dequantized_rows(n, k, x.itemsize)

    def launches(scratch: Tensor, _: Tensor) -> list[KernelCall | Call]:
        made: list[KernelCall | Call] = []
        for first in range(0, n, each):
            part = slice(first, min(n, first + each))
            tile = rows[part]
            weight = scratch[: tile.shape[0] * k * x.itemsize].view(x.dtype).view(tile.shape[0], k)
            if k:
                made.append(dequantize_call(tile, stored, False, weight))
            multiplier, residual = (None if t is None else t[..., part] for t in (after.multiplier, after.residual))
            then = After(after.activation, multiplier, residual)
            made.append(bind_by_torch(x, weight.mT, None if bias is None else bias[part], out[..., part], False, then))
        return made

    return bound_with_scratch(x.device, each * k * x.itemsize, 0, launches)
