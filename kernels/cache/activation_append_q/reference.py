"""The definition of `forebay::activation_append_q`, and the checks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.cpu_support import native
from forebay.kernels.formats import packing, row_sizes
from forebay.kernels.quantization.quantize import reference as quantize_reference

OP = "activation_append_q"
SCALE_DTYPE = torch.float16
GROUPS = (32, 64, 128)


def pack(x: Tensor, bits: int, group: int) -> Tensor:
    """x [..., H] as packed rows uint8 [..., R], by plain torch on any device; NaN where a group is not held."""
    return packing.pack_rows(*quantize_reference.reference(x, bits, group, -1, SCALE_DTYPE))


def unpack(rows: Tensor, features: int, bits: int, group: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [..., H = features] of packed rows [..., R], by plain torch on any device."""
    parts = packing.unpack_rows(rows, features, bits, group, SCALE_DTYPE)
    return quantize_reference.dequantize_reference(*parts, bits, group, -1, features, dtype)


def reference(cache: Tensor, x: Tensor, rows: Tensor, bits: int, group: int) -> Tensor:
    """New checkpoints [B, L, R] with x [B, S, H] in the rows [B, S], on any device."""
    made = cache.clone()
    made[torch.arange(len(rows), device=rows.device)[:, None], rows] = pack(x, bits, group)
    return made


def fail(argument: str, problem: str) -> None:
    raise ValueError(f"{OP}: {argument} {problem}")


def check_format(op: str, bits: int, group: int) -> None:
    """ValueError, opened by op, unless rows of this format exist."""
    if bits not in row_sizes.BITS:
        raise ValueError(f"{op}: bits must be one of {row_sizes.BITS}, got {bits}")
    if group not in GROUPS:
        raise ValueError(f"{op}: group must be one of {GROUPS}, got {group}")


def check(cache: Tensor, x: Tensor, rows: Tensor, bits: int, group: int) -> None:
    """ValueError names the argument whose dtype, shape or device is wrong; rows are looked at when used."""
    check_format(OP, bits, group)
    if x.dim() != 3 or x.dtype not in native.DTYPES or x.shape[-1] < 1:
        fail("x", f"must be [B, S, H] of fp32, bf16 or fp16, got {x.dtype} {tuple(x.shape)}")
    wanted = (x.shape[0], cache.shape[1] if cache.dim() == 3 else "L", row_sizes.row_nbytes(x.shape[2], bits, group))
    if cache.dtype != torch.uint8 or tuple(cache.shape) != wanted:
        fail("cache", f"must be uint8 {wanted}, got {cache.dtype} {tuple(cache.shape)}")
    if cache.stride(2) != 1 or cache.stride(0) % 2 or cache.stride(1) % 2 or cache.storage_offset() % 2:
        fail("cache", f"must have contiguous rows at even addresses, got strides {cache.stride()}")
    if rows.dtype != torch.int64 or rows.shape != x.shape[:2]:
        fail("rows", f"must be int64 of shape {tuple(x.shape[:2])}, got {rows.dtype} {tuple(rows.shape)}")
    for tensor, name in ((x, "x"), (rows, "rows")):
        if tensor.device != cache.device:
            fail(name, f"must be on {cache.device}, got {tensor.device}")
