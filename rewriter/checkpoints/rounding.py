"""Values of matrices as packed rows, and as what such rows give back."""

from __future__ import annotations

import torch

from forebay.kernels.formats import packing
from forebay.kernels.formats.packing import Packing
from forebay.kernels.formats.table import Format
from forebay.kernels.quantization.quantize.operator import dequantize, quantize
from forebay.kernels.quantization.quantize.reference import coded_rows


def pack_values(values: torch.Tensor, stored: Format, rounding: str, scale_dtype: torch.dtype) -> torch.Tensor:
    """Rows [N, R] of finite float32 values [N, K]; `rounding` is that of formats with lows."""
    if stored.codebook:
        return coded_rows(values, stored.bits, stored.group_size, stored.symmetric, stored.codebook)
    rounding = "symmetric" if stored.symmetric else rounding
    codes, scale, low = quantize(values, stored.bits, stored.group_size, -1, scale_dtype, rounding)
    return packing.pack_rows(codes, scale, None if stored.symmetric else low)


def round_rows(values: torch.Tensor, stored: Format, rounding: str, scale_dtype: torch.dtype) -> torch.Tensor:
    """Return the values that the rows of `pack_values` stand for, in float32."""
    values = values.contiguous()
    scale_dtype = torch.bfloat16 if stored.codebook else scale_dtype
    rows = pack_values(values, stored, rounding, scale_dtype)
    means = Packing(stored.bits, values.shape[1], stored.group_size, scale_dtype, stored.symmetric, stored.codebook)
    return dequantize(*means.unpack(rows), stored.bits, stored.group_size, -1, values.shape[1], torch.float32,
                      stored.codebook)


def fitting_scale_dtype(most: float) -> torch.dtype:
    """fp16, or bf16 for a matrix whose largest magnitude `most` fp16 cannot hold."""
    return torch.float16 if 2 * most <= torch.finfo(torch.float16).max else torch.bfloat16


def closest_scale_dtype(scales: torch.Tensor, lows: torch.Tensor | None = None) -> torch.dtype:
    """fp16, or bf16 where that rounds the stored scales of a matrix less, or lows beside scales that both hold, or fp16
    cannot hold its lows."""
    if lows is not None and not bool((lows.abs() <= torch.finfo(torch.float16).max).all()):
        return torch.bfloat16
    some, others = scales[scales != 0].double(), (torch.zeros(1) if lows is None else lows).double()
    lost = [(float(((some.to(dtype) - some) / some).abs().max()) if len(some) else 0.0,
             float((others.to(dtype) - others).abs().max()) if others.numel() else 0.0)
            for dtype in (torch.float16, torch.bfloat16)]
    return min(zip(lost, (torch.float16, torch.bfloat16), strict=True), key=lambda each: each[0])[1]
