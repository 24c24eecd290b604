"""`forebay::dequantize_rows` in ONNX: codes taken apart by standard operators; symmetric rows that were looked up in a
table are one operator of onnxruntime's."""

from __future__ import annotations

from typing import Any

import torch

from forebay.kernels.onnx_meaning import MICROSOFT, OnnxGraph, OnnxValue, Parts
from forebay.kernels.quantization.dequantize_rows.reference import Unpacking


def dequantize_rows(g: OnnxGraph, rows: OnnxValue, *how: Any) -> str:
    """Return the values of packed rows, [..., K], or [K, N] if transposed."""
    assert rows.parts is not None
    in_features, bits, _, _, dtype, transposed, *_ = Unpacking(*how)
    values = _looked_up(g, rows.parts, bits, in_features, dtype, len(rows.shape)) or dequantized(
        g, rows.parts, bits, in_features, dtype, len(rows.shape))
    return g.op("Transpose", values, perm=[1, 0]) if transposed else values


def _looked_up(
    g: OnnxGraph, parts: Parts, bits: int, in_features: int, dtype: torch.dtype, dims: int
) -> str | None:
    """[..., K] of symmetric rows that were gathered from a table, by the operator that gathers and multiplies. None for
    others: its zero points are whole numbers, and its groups powers of two from 16."""
    codes, scale, low = parts
    tables = [g.source(part, "Gather") for part in (codes, scale)]
    group = (codes.shape[-1] or 0) * 8 // bits
    if g.dialect != "microsoft" or low is not None or None in tables or group < 16 or group & (group - 1):
        return None
    (all_codes, index), (all_scales, _) = (found[0] for found in tables if found is not None)
    scales = g.once(("scales", all_scales), lambda: g.cast(all_scales, torch.float32))  # [N, g]
    values = g.op("GatherBlockQuantized", all_codes, index, g.op("Unsqueeze", scales, g.constant([-1])),
                  domain=MICROSOFT, bits=bits, block_size=group, gather_axis=0, quantize_axis=2)
    return _whole_rows(g, values, in_features, dtype, dims)


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
    return _whole_rows(g, values, in_features, dtype, dims)


def _whole_rows(g: OnnxGraph, values: str, in_features: int, dtype: torch.dtype, dims: int) -> str:
    """[..., groups, group] as [..., K] in dtype."""
    flat = g.op("Reshape", values, g.constant([0] * (dims - 1) + [-1]))
    cut: str = g.op("Slice", flat, g.constant([0]), g.constant([in_features]), g.constant([-1]))
    return cut if dtype == torch.float32 else g.cast(cut, dtype)
