"""`forebay::dequantize_rows` in ONNX: codes taken apart by standard operators."""

from __future__ import annotations

import torch

from forebay.kernels.onnx_meaning import OnnxGraph, OnnxValue, Parts


def dequantize_rows(
    g: OnnxGraph, rows: OnnxValue, in_features: int, bits: int, group_size: int, scale_dtype: torch.dtype,
    dtype: torch.dtype, transposed: bool,
) -> str:
    """What packed rows stand for, [..., K], or [K, N] if transposed."""
    assert rows.parts is not None
    values = dequantized(g, rows.parts, bits, in_features, dtype, len(rows.shape))
    return g.op("Transpose", values, perm=[1, 0]) if transposed else values


def dequantized(
    g: OnnxGraph, parts: Parts, bits: int, in_features: int, dtype: torch.dtype,
    dims: int,
) -> str:
    """code * scale + low in float32, rounded to dtype: [..., K] of `dims` dimensions."""
    codes, scale, low = parts  # [..., g, bytes], [..., g]
    last = g.constant([-1])
    if bits == 4:
        low_nibble = g.op("BitwiseAnd", codes, g.constant(15, torch.uint8))
        high_nibble = g.op("BitShift", codes, g.constant(4, torch.uint8), direction="RIGHT")
        pair = g.op("Concat", g.op("Unsqueeze", low_nibble, last), g.op("Unsqueeze", high_nibble, last), axis=-1)
        whole = g.op("Reshape", pair, g.constant([0] * dims + [-1]))
    else:
        whole = codes
    numbers = g.cast(whole, torch.float32)
    if low is None:
        numbers = g.op("Sub", numbers, g.constant(float(1 << (bits - 1)), torch.float32))
    values = g.op("Mul", numbers, g.op("Unsqueeze", g.cast(scale, torch.float32), last))
    if low is not None:
        values = g.op("Add", values, g.op("Unsqueeze", g.cast(low, torch.float32), last))
    flat = g.op("Reshape", values, g.constant([0] * (dims - 1) + [-1]))
    cut = g.op("Slice", flat, g.constant([0]), g.constant([in_features]), last)
    return cut if dtype == torch.float32 else g.cast(cut, dtype)
