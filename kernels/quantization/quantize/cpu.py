"""`forebay::quantize` on the CPU."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from forebay.kernels.cpu_support import native
from forebay.kernels.formats import packing, row_sizes
from forebay.kernels.formats.codebooks import CODEBOOKS
from forebay.kernels.quantization.quantize.reference import PIECE_ELEMENTS, check, quantize_matrix, refuse_unheld


class QuantizeArgs(ctypes.Structure):
    """Mirror of `QuantizeArgs` in quantize.cpp; x_stride in elements, the others in bytes."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "packed", "scale", "low", "unheld")),
        *((name, ctypes.c_int64) for name in ("rows", "k", "x_stride", "group")),
        *((name, ctypes.c_int64) for name in ("packed_stride", "scale_stride", "low_stride")),
        *((name, ctypes.c_int32) for name in ("bits", "scale_dtype", "dtype", "codebook")),
    )


NATIVE_MAX_GROUP = 1024


def _native_args(
    x: Tensor, parts: tuple[Tensor | None, ...], unheld: ctypes.c_int32, bits: int, group_size: int,
    codebook: str = "",
) -> QuantizeArgs:
    packed, scale, low = parts
    assert packed is not None and scale is not None
    return QuantizeArgs(
        *(None if t is None else t.data_ptr() for t in (x, *parts)), ctypes.addressof(unheld), *x.shape, x.stride(0),
        group_size, packed.stride(0), 2 * scale.stride(0), 0 if low is None else 2 * low.stride(0),
        bits, native.DTYPES[scale.dtype], native.DTYPES[x.dtype], CODEBOOKS.index(codebook),
    )  # fmt: skip


def native_quantize(x: Tensor, parts: tuple[Tensor, Tensor, Tensor], bits: int, group_size: int) -> native.NativeCall:
    """Min-max `quantize` of x [rows, size] along its second dimension into parts, as a call of the C++ kernel.

    Where a group cannot be held its scale becomes NaN. Columns must be contiguous and group_size at most
    NATIVE_MAX_GROUP; the caller checks.
    """
    unheld = ctypes.c_int32(0)
    return native.NativeCall("quantize", _native_args(x, parts, unheld, bits, group_size), (x, *parts, unheld))


def native_dequantize(
    parts: tuple[Tensor, Tensor, Tensor | None], out: Tensor, bits: int, group_size: int, codebook: str = ""
) -> native.NativeCall:
    """`dequantize` along the second dimension of matrices into out [rows, size], as a call of the C++ kernel.

    Columns must be contiguous and group_size at most NATIVE_MAX_GROUP; the caller checks.
    """
    unheld = ctypes.c_int32(0)
    args = _native_args(out, parts, unheld, bits, group_size, codebook)
    return native.NativeCall("dequantize", args, (*parts, out, unheld))


def is_plain(*matrices: Tensor) -> bool:
    return all(t.shape[1] <= 1 or t.stride(1) == 1 for t in matrices)


def quantize_into(x: Tensor, bits: int, group_size: int, rounding: str, parts: tuple[Tensor, ...]) -> None:
    """Groups along the last dimension of x [rows, size] into parts (packed, scale, low), in bounded scratch."""
    library = native.load() if rounding == "minmax" and group_size <= NATIVE_MAX_GROUP else None
    step = max(1, PIECE_ELEMENTS // max(1, x.shape[1]))
    if library is not None and is_plain(x, *parts):
        step = max(1, x.shape[0])
    for begin in range(0, x.shape[0] if x.shape[1] else 0, step):
        piece = x[begin : begin + step]
        made = tuple(part[begin : begin + step] for part in parts)
        if library is None:
            found = quantize_matrix(piece, bits, group_size, made[1].dtype, rounding)
            for whole, part in zip(made, found, strict=True):
                whole.copy_(part)
            unheld = bool(made[1].isnan().any())
        else:
            piece, flag = piece if is_plain(piece) else piece.contiguous(), ctypes.c_int32(0)
            args = _native_args(piece, made, flag, bits, group_size)
            native.NativeCall("quantize", args, (piece, *made, flag))()
            unheld = bool(flag.value)
        if unheld:
            refuse_unheld(piece, made[1].dtype)


def quantize_rows(
    weight: Tensor,
    bits: int,
    group_size: int,
    scale_dtype: torch.dtype = torch.float16,
    rounding: str = "minmax",
    out: Tensor | None = None,
) -> Tensor:
    """weight [N, K] on the CPU as packed rows [N, R] (see `packing`), in bounded scratch beside the result.

    out, uint8 [N, R] with contiguous columns, takes the result where it is given. ValueError as `quantize`.
    """
    check(weight, bits, group_size, -1, scale_dtype, rounding)
    shape = (weight.shape[0], row_sizes.row_nbytes(weight.shape[-1], bits, group_size))
    if weight.dim() != 2 or weight.device.type != "cpu":
        raise ValueError(f"quantize: weight must be [N, K] on the CPU, got {weight.device} {tuple(weight.shape)}")
    if out is None:
        out = torch.empty(shape, dtype=torch.uint8)
    elif out.shape != shape or out.dtype != torch.uint8 or not is_plain(out):
        raise ValueError(f"quantize: out must be uint8 {shape} with contiguous columns, got {out.dtype} {out.shape}")
    packed, scale, low = packing.unpack_rows(out, weight.shape[1], bits, group_size, scale_dtype)
    assert low is not None
    out[:, packed.shape[1] + 4 * scale.shape[1] :] = 0
    quantize_into(weight, bits, group_size, rounding, (packed, scale, low))
    return out
