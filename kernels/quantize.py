"""`forebay::quantize` and `forebay::dequantize`: group-wise asymmetric 4 and 8 bits (FlexGen, section 5).

Along dimension `dim`, `group_size` consecutive elements share a scale and a low: code q = round((x - low) / scale),
ties to even, and x ~ q * scale + low, all in fp32. Layout: `packing`. Rounding of the range:

    minmax  the paper's formula on the stored range: low is the minimum rounded down to scale_dtype, and scale the rest
            of the range over 2^bits - 1, rounded up. So every x lies in the range, and the round-trip error is at most
            half the stored scale (within fp32 rounding: 2^-22 of the range). A group of equal values has scale 0 and
            is exact where scale_dtype holds the value. Where it holds minimum and scale, codes are the paper's.
    mse     of the ranges clipped by MSE_CLIPS, each refitted to its codes by least squares, the one with the least
            squared error; never worse than minmax in that measure. Clipped values are off by more than half a step.

A group that holds NaN or infinity, or a range that scale_dtype cannot (beyond 65504 for fp16), gets scale NaN and
codes 0: all of it reads back as NaN. On the CPU `quantize` raises ValueError instead; on CUDA it does not look.
"""

from __future__ import annotations

import ctypes
import itertools

import torch
from torch import Tensor

from forebay.kernels import native, packing
from forebay.kernels.quantized_native import QuantizeArgs

ROUNDINGS = ("minmax", "mse")
# Parts of the range clipped at either end, in every combination. The squared error of normal values falls by 17 %, of
# Student's t with 3 degrees of freedom by 25 %; 16 symmetric ranges with two refits each give 14 and 24 %.
MSE_CLIPS = (0.0, 0.03, 0.07, 0.12, 0.18)
# Elements that the torch path handles at a time: it holds some ten fp32 copies of them.
PIECE_ELEMENTS = 1 << 18
NATIVE_MAX_GROUP = 1024


def _next(value: Tensor, up: bool) -> Tensor:
    """The adjacent representable fp16 or bf16 number, upward or downward; value is finite."""
    bits = value.contiguous().view(torch.int16)
    away = (value >= 0) if up else (value < 0)
    moved = torch.where(away, bits + 1, bits - 1)
    zero = torch.full_like(bits, 1 if up else -(1 << 15) + 1)
    return torch.where(value == 0, zero, moved).view(value.dtype)


def _min_max_range(groups: Tensor, bits: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(scale, low) of fp32 groups [..., G], rounded outward; scale is NaN where scale_dtype cannot hold the range."""
    exact = groups.amin(-1) + 0.0  # -0 becomes 0
    low = exact.to(scale_dtype)
    low = torch.where(low.float() > exact, _next(low, up=False), low)
    top = (1 << bits) - 1
    span = groups.amax(-1) - low.float() + 0.0
    scale = (span / top).to(scale_dtype)
    scale = torch.where(scale.float() * top < span, _next(scale, up=True), scale)
    held = (scale.float() * top).isfinite() & low.isfinite()
    return torch.where(held, scale, torch.nan), low


def _codes(groups: Tensor, scale: Tensor, low: Tensor, bits: int) -> Tensor:
    """fp32 codes of groups [..., G]; 0 where the scale is 0."""
    step, base = scale.float()[..., None], low.float()[..., None]
    q = ((groups - base) / step).round_().clamp_(0, (1 << bits) - 1)
    return torch.where(step > 0, q, 0.0)


def _least_squares_range(groups: Tensor, valid: Tensor, bits: int, scale: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """(scale, low) with the least squared error over valid elements that the search finds, given the min-max range."""

    def error(scale: Tensor, low: Tensor) -> Tensor:
        made = _codes(groups, scale, low, bits) * scale.float()[..., None] + low.float()[..., None]
        return ((made - groups).square() * valid).sum(-1)

    best, best_scale, best_low = error(scale, low), scale, low
    count, top = valid.sum(-1), (1 << bits) - 1
    mean = (groups * valid).sum(-1) / count
    span = scale.float() * top
    for below, above in itertools.product(MSE_CLIPS, MSE_CLIPS):
        step, base = span * ((1 - below - above) / top), low.float() + span * below
        q = _codes(groups, step, base, bits) * valid
        q_mean = q.sum(-1) / count
        spread = (q - q_mean[..., None]) * valid
        fitted = (spread * groups).sum(-1) / spread.square().sum(-1)
        step = torch.where(fitted > 0, fitted, step)
        base = mean - step * q_mean
        tried_scale, tried_low = step.to(scale.dtype), base.to(low.dtype)
        tried = error(tried_scale, tried_low)
        better = tried < best
        best = torch.where(better, tried, best)
        best_scale, best_low = torch.where(better, tried_scale, best_scale), torch.where(better, tried_low, best_low)
    return best_scale, best_low


def _quantize_matrix(
    x: Tensor, bits: int, group_size: int, scale_dtype: torch.dtype, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, size] by torch, groups along the last dimension: codes packed, scale, low."""
    size = x.shape[1]
    count = packing.group_count(size, group_size)
    place = torch.arange(count * group_size, device=x.device)
    # Places beyond the end repeat their group's first element, which changes neither minimum nor maximum.
    source = torch.where(place < size, place, place // group_size * group_size)
    groups = x.float()[:, source].view(x.shape[0], count, group_size)
    valid = (place < size).view(count, group_size)
    scale, low = _min_max_range(groups, bits, scale_dtype)
    if rounding == "mse":
        scale, low = _least_squares_range(groups, valid, bits, scale, low)
    codes = (_codes(groups, scale, low, bits) * valid).to(torch.uint8)
    return packing.pack_codes(codes.flatten(1), bits), scale, low


def reference(
    x: Tensor, bits: int, group_size: int, dim: int, scale_dtype: torch.dtype, rounding: str = "minmax"
) -> tuple[Tensor, Tensor, Tensor]:
    """quantize by plain torch, on any device, without looking for NaN; shapes as in `quantize`."""
    moved = x.movedim(dim, -1)
    parts = _quantize_matrix(moved.reshape(-1, moved.shape[-1]), bits, group_size, scale_dtype, rounding)
    return tuple(part.view(*moved.shape[:-1], -1).movedim(-1, dim).contiguous() for part in parts)  # type: ignore[return-value]


def dequantize_reference(
    packed: Tensor,
    scale: Tensor,
    low: Tensor,
    bits: int,
    group_size: int,
    dim: int,
    size: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """dequantize by plain torch, on any device; shapes as in `dequantize`."""
    codes = packing.unpack_codes(packed.movedim(dim, -1), bits).unflatten(-1, (-1, group_size))
    x = codes.float() * scale.movedim(dim, -1).float()[..., None] + low.movedim(dim, -1).float()[..., None]
    return _round_to(x.flatten(-2)[..., :size], dtype).movedim(-1, dim).contiguous()


def _round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 x in dtype; finite values stay finite: the top of a range may lie just beyond the largest number."""
    limit = torch.finfo(dtype).max
    return torch.where(x.isfinite(), x.clamp(-limit, limit), x).to(dtype)


def check(x: Tensor, bits: int, group_size: int, dim: int, scale_dtype: torch.dtype, rounding: str) -> None:
    """ValueError names the argument of quantize that is wrong."""
    packing.check_format("quantize", bits, group_size)
    if x.dtype not in native.DTYPES:
        raise ValueError(f"quantize: x must be fp32, bf16 or fp16, got {x.dtype}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"quantize: dim must be one of x's {x.dim()} dimensions, got {dim}")
    if scale_dtype not in packing.SCALE_DTYPES:
        raise ValueError(f"quantize: scale_dtype must be fp16 or bf16, got {scale_dtype}")
    if rounding not in ROUNDINGS:
        raise ValueError(f"quantize: rounding must be one of {ROUNDINGS}, got {rounding!r}")


def check_packed(
    packed: Tensor, scale: Tensor, low: Tensor, bits: int, group_size: int, dim: int, size: int, dtype: torch.dtype
) -> None:
    """ValueError names the argument of dequantize that is wrong."""
    packing.check_format("dequantize", bits, group_size)
    if packed.dtype != torch.uint8:
        raise ValueError(f"dequantize: packed must be uint8, got {packed.dtype}")
    if not -packed.dim() <= dim < packed.dim():
        raise ValueError(f"dequantize: dim must be one of packed's {packed.dim()} dimensions, got {dim}")
    if size < 0 or packed.shape[dim] != packing.codes_nbytes(size, bits, group_size):
        wanted = packing.codes_nbytes(size, bits, group_size)
        raise ValueError(f"dequantize: packed must hold {wanted} bytes along {dim}, got shape {tuple(packed.shape)}")
    shape = list(packed.shape)
    shape[dim] = packing.group_count(size, group_size)
    for part, name in ((scale, "scale"), (low, "low")):
        if list(part.shape) != shape or part.dtype not in packing.SCALE_DTYPES or part.dtype != scale.dtype:
            raise ValueError(f"dequantize: {name} must be fp16 or bf16 {shape}, got {part.dtype} {tuple(part.shape)}")
    if dtype not in native.DTYPES:
        raise ValueError(f"dequantize: dtype must be fp32, bf16 or fp16, got {dtype}")


def _output_shapes(shape: tuple[int, ...], bits: int, group_size: int, dim: int) -> tuple[list[int], list[int]]:
    codes, groups = list(shape), list(shape)
    codes[dim] = packing.codes_nbytes(shape[dim], bits, group_size)
    groups[dim] = packing.group_count(shape[dim], group_size)
    return codes, groups


def _refuse_unheld(x: Tensor, scale_dtype: torch.dtype) -> None:
    """The ValueError for an x of which some group cannot be held."""
    if not x.isfinite().all():
        raise ValueError("quantize: x holds NaN or infinity")
    limit = torch.finfo(scale_dtype).max
    advice = "; scale_dtype=torch.bfloat16 holds more" if scale_dtype == torch.float16 else ""
    raise ValueError(f"quantize: x has a range beyond {limit:.3g}, which {scale_dtype} cannot hold{advice}")


def _native_args(
    x: Tensor, parts: tuple[Tensor, ...], unheld: ctypes.c_int32, bits: int, group_size: int
) -> QuantizeArgs:
    packed, scale, low = parts
    return QuantizeArgs(
        *(t.data_ptr() for t in (x, *parts)), ctypes.addressof(unheld), *x.shape, x.stride(0), group_size,
        packed.stride(0), 2 * scale.stride(0), 2 * low.stride(0),
        bits, native.DTYPES[scale.dtype], native.DTYPES[x.dtype],
    )  # fmt: skip


def native_quantize(x: Tensor, parts: tuple[Tensor, Tensor, Tensor], bits: int, group_size: int) -> native.NativeCall:
    """Min-max `quantize` of x [rows, size] along its second dimension into parts, as a call of the C++ kernel.

    Where a group cannot be held its scale becomes NaN. Columns must be contiguous and group_size at most
    NATIVE_MAX_GROUP; the caller checks.
    """
    unheld = ctypes.c_int32(0)
    return native.NativeCall("quantize", _native_args(x, parts, unheld, bits, group_size), (x, *parts, unheld))


def native_dequantize(
    parts: tuple[Tensor, Tensor, Tensor], out: Tensor, bits: int, group_size: int
) -> native.NativeCall:
    """`dequantize` along the second dimension of matrices into out [rows, size], as a call of the C++ kernel.

    Columns must be contiguous and group_size at most NATIVE_MAX_GROUP; the caller checks.
    """
    unheld = ctypes.c_int32(0)
    args = _native_args(out, parts, unheld, bits, group_size)
    return native.NativeCall("dequantize", args, (*parts, out, unheld))


def _plain(*matrices: Tensor) -> bool:
    return all(t.shape[1] <= 1 or t.stride(1) == 1 for t in matrices)


def _quantize_into(x: Tensor, bits: int, group_size: int, rounding: str, parts: tuple[Tensor, ...]) -> None:
    """Groups along the last dimension of x [rows, size] into parts (packed, scale, low), in bounded scratch."""
    library = native.load() if rounding == "minmax" and group_size <= NATIVE_MAX_GROUP else None
    step = max(1, PIECE_ELEMENTS // max(1, x.shape[1]))
    if library is not None and _plain(x, *parts):
        step = max(1, x.shape[0])
    for begin in range(0, x.shape[0] if x.shape[1] else 0, step):
        piece = x[begin : begin + step]
        made = tuple(part[begin : begin + step] for part in parts)
        if library is None:
            found = _quantize_matrix(piece, bits, group_size, made[1].dtype, rounding)
            for whole, part in zip(made, found, strict=True):
                whole.copy_(part)
            unheld = bool(made[1].isnan().any())
        else:
            piece, flag = piece if _plain(piece) else piece.contiguous(), ctypes.c_int32(0)
            args = _native_args(piece, made, flag, bits, group_size)
            library.forebay_quantize(ctypes.addressof(args), None, 0, torch.get_num_threads())
            unheld = bool(flag.value)
        if unheld:
            _refuse_unheld(piece, made[1].dtype)


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
    shape = (weight.shape[0], packing.row_nbytes(weight.shape[-1], bits, group_size))
    if weight.dim() != 2 or weight.device.type != "cpu":
        raise ValueError(f"quantize: weight must be [N, K] on the CPU, got {weight.device} {tuple(weight.shape)}")
    if out is None:
        out = torch.empty(shape, dtype=torch.uint8)
    elif out.shape != shape or out.dtype != torch.uint8 or not _plain(out):
        raise ValueError(f"quantize: out must be uint8 {shape} with contiguous columns, got {out.dtype} {out.shape}")
    parts = packing.unpack_rows(out, weight.shape[1], bits, group_size, scale_dtype)
    out[:, parts[0].shape[1] + 4 * parts[1].shape[1] :] = 0
    _quantize_into(weight, bits, group_size, rounding, parts)
    return out


@torch.library.custom_op("forebay::quantize", mutates_args=(), device_types="cpu")
def quantize(
    x: Tensor, bits: int, group_size: int, dim: int, scale_dtype: torch.dtype, rounding: str = "minmax"
) -> tuple[Tensor, Tensor, Tensor]:
    """x of any shape, groups of group_size along dim -> (packed uint8, scale, low).

    With size = x.shape[dim] and g = ceil(size / group_size), they have x's shape but along dim: packed has
    g * group_size * bits / 8 bytes, scale and low g elements. x is fp32, bf16 or fp16; bits 4 or 8; group_size even.
    ValueError names what is wrong, NaN and infinity in x included.
    """
    check(x, bits, group_size, dim, scale_dtype, rounding)
    moved = x.movedim(dim, -1)
    shapes = _output_shapes(tuple(moved.shape), bits, group_size, -1)
    dtypes = (torch.uint8, scale_dtype, scale_dtype)
    made = [torch.empty(shapes[i > 0], dtype=dtype) for i, dtype in enumerate(dtypes)]
    matrices = tuple(part.view(-1, part.shape[-1]) if part.numel() else part.view(0, 0) for part in made)
    if x.numel():
        _quantize_into(moved.reshape(-1, moved.shape[-1]), bits, group_size, rounding, matrices)
    packed, scale, low = (part.movedim(-1, dim).contiguous() for part in made)
    return packed, scale, low


@quantize.register_fake
def _(
    x: Tensor, bits: int, group_size: int, dim: int, scale_dtype: torch.dtype, rounding: str = "minmax"
) -> tuple[Tensor, Tensor, Tensor]:
    check(x, bits, group_size, dim, scale_dtype, rounding)
    codes, groups = _output_shapes(tuple(x.shape), bits, group_size, dim)
    return (
        x.new_empty(codes, dtype=torch.uint8),
        x.new_empty(groups, dtype=scale_dtype),
        x.new_empty(groups, dtype=scale_dtype),
    )


@quantize.register_kernel("cuda")
def _(
    x: Tensor, bits: int, group_size: int, dim: int, scale_dtype: torch.dtype, rounding: str = "minmax"
) -> tuple[Tensor, Tensor, Tensor]:
    check(x, bits, group_size, dim, scale_dtype, rounding)
    if rounding != "minmax":  # a search made once per weight: torch's own kernels serve
        return reference(x, bits, group_size, dim, scale_dtype, rounding)
    from forebay.kernels.gpu import quantize as gpu

    return gpu.quantize(x, bits, group_size, dim, scale_dtype)


@torch.library.custom_op("forebay::dequantize", mutates_args=(), device_types="cpu")
def dequantize(
    packed: Tensor,
    scale: Tensor,
    low: Tensor,
    bits: int,
    group_size: int,
    dim: int,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """What quantize gave, as x of dtype with `size` elements along dim: q * scale + low in fp32, then rounded once.

    The three may be strided, as `packing.unpack_rows` gives them. ValueError names what is wrong.
    """
    check_packed(packed, scale, low, bits, group_size, dim, size, dtype)
    parts = (packed, scale, low)
    plain = packed.dim() == 2 and dim % 2 == 1 and _plain(*parts) and group_size <= NATIVE_MAX_GROUP
    if not plain or native.load() is None:
        return dequantize_reference(packed, scale, low, bits, group_size, dim, size, dtype)
    x = torch.empty(packed.shape[0], size, dtype=dtype)
    if x.numel():
        native_dequantize(parts, x, bits, group_size)()
    return x


@dequantize.register_fake
def _(
    packed: Tensor,
    scale: Tensor,
    low: Tensor,
    bits: int,
    group_size: int,
    dim: int,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    check_packed(packed, scale, low, bits, group_size, dim, size, dtype)
    shape = list(packed.shape)
    shape[dim] = size
    return packed.new_empty(shape, dtype=dtype)


@dequantize.register_kernel("cuda")
def _(
    packed: Tensor,
    scale: Tensor,
    low: Tensor,
    bits: int,
    group_size: int,
    dim: int,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    check_packed(packed, scale, low, bits, group_size, dim, size, dtype)
    from forebay.kernels.gpu import quantize as gpu

    return gpu.dequantize(packed, scale, low, bits, group_size, dim, size, dtype)
