"""`forebay::dequantize_rows` in Triton: the kernel of `dequantize` on the codes, scales and lows of packed rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from forebay.kernels.formats.codebooks import CODEBOOKS
from forebay.kernels.formats.packing import Packing
from forebay.kernels.gpu_support.arguments import check_tensor, fail
from forebay.kernels.gpu_support.launches import KernelCall, bound, kernel_call
from forebay.kernels.quantization.dequantize_rows.reference import Unpacking, check
from forebay.kernels.quantization.quantize.gpu import FLOATS, MAX_GROUP, TILE_ELEMENTS, WARPS, dequantize_kernel

OP = "dequantize_rows"


def dequantize_call(rows: Tensor, stored: Packing, transposed: bool, out: Tensor) -> KernelCall:
    """The launch that fills out [N, K], or [K, N] if transposed, from rows uint8 [N, R] that have been checked."""
    bits, size, group_size, _, symmetric, codebook = stored
    packed, scale, low = stored.unpack(rows)
    parts = packed, scale, scale if low is None else low
    padded, groups = triton.next_power_of_2(group_size), triton.cdiv(size, group_size)
    tile, count = max(1, TILE_ELEMENTS // padded), rows.shape[0] * groups
    return kernel_call(
        dequantize_kernel, (triton.cdiv(count, tile), 1, 1), *parts, out, count, groups, size, 1,
        *(part.stride(0) for part in parts), out.stride(0), torch.finfo(out.dtype).max,
        BITS=bits, GROUP=group_size, PADDED=padded, LAST=True, TRANSPOSED=transposed, SYMMETRIC=symmetric,
        CODEBOOK=CODEBOOKS.index(codebook), R=tile, num_warps=WARPS,
    )  # fmt: skip


def bind_dequantize_rows(rows: Tensor, *how: Any, out: Tensor) -> Callable[[], None]:
    """A call without arguments that fills out from the present contents of rows: rows [..., R] to [..., K] of dtype,
    or [N, R] to [K, N] if transposed. ValueError names what is wrong, before the launch."""
    in_features, bits, group_size, scale_dtype, dtype, transposed, symmetric, codebook = Unpacking(*how)
    check(rows, in_features, bits, group_size, transposed, symmetric)
    check_tensor(OP, "rows", rows, dtype=torch.uint8)
    if group_size > MAX_GROUP:
        fail(OP, "group_size", f"must be at most {MAX_GROUP}, got {group_size}")
    shape = (in_features, rows.shape[0]) if transposed else (*rows.shape[:-1], in_features)
    check_tensor(OP, "out", out, device=rows.device, dtype=FLOATS, shape=shape)
    if out.dtype != dtype:
        fail(OP, "out", f"must be of {dtype}, got {out.dtype}")
    if out.numel() == 0:
        return lambda: None
    try:
        matrix = rows.view(-1, rows.shape[-1])
        into = out if transposed else out.view(-1, in_features)
    except RuntimeError:
        fail(OP, "rows", f"and out must have leading dimensions of one stride, got {rows.stride()}, {out.stride()}")
    stored = Packing(bits, in_features, group_size, scale_dtype, symmetric, codebook)
    return bound(dequantize_call(matrix, stored, transposed, into))
