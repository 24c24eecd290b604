"""The definition of `forebay::quantize`, and the checks of its arguments."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from forebay.kernels.cpu_support import native
from forebay.kernels.formats import packing, row_sizes
from forebay.kernels.formats.codebooks import (
    CODEBOOKS,
    codebook_values,
    joined_scales,
    largest,
    nearest_codes,
    split_scales,
)

ROUNDINGS = ("minmax", "mse", "symmetric")
# Parts of the range clipped at either end, in every combination. The squared error of normal values falls by 17 %, of
# Student's t with 3 degrees of freedom by 25 %; 16 symmetric ranges with two refits each give 14 and 24 %.
MSE_CLIPS = (0.0, 0.03, 0.07, 0.12, 0.18)
# Elements that the torch path handles at a time: it holds some ten fp32 copies of them.
PIECE_ELEMENTS = 1 << 18


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


def _symmetric_range(groups: Tensor, bits: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(scale, low) of fp32 groups [..., G] whose middle code stands for 0; scale is NaN where low cannot be held."""
    middle = 1 << (bits - 1)
    exact = torch.maximum(groups.amin(-1) / -middle, groups.amax(-1) / (middle - 1)) + 0.0
    scale = exact.to(scale_dtype)
    scale = torch.where(scale.float() < exact, _next(scale, up=True), scale)
    low = (scale.float() * -middle + 0.0).to(scale_dtype)  # a power of two: exact
    return torch.where(low.isfinite(), scale, torch.nan), low


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


def quantize_matrix(
    x: Tensor, bits: int, group_size: int, scale_dtype: torch.dtype, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, size] by torch, groups along the last dimension: codes packed, scale, low."""
    size = x.shape[1]
    count = row_sizes.group_count(size, group_size)
    place = torch.arange(count * group_size, device=x.device)
    # Places beyond the end repeat their group's first element, which changes neither minimum nor maximum.
    source = torch.where(place < size, place, place // group_size * group_size)
    groups = x.float()[:, source].view(x.shape[0], count, group_size)
    valid = (place < size).view(count, group_size)
    scale, low = (_symmetric_range if rounding == "symmetric" else _min_max_range)(groups, bits, scale_dtype)
    if rounding == "mse":
        scale, low = _least_squares_range(groups, valid, bits, scale, low)
    codes = (_codes(groups, scale, low, bits) * valid).to(torch.uint8)
    return packing.pack_codes(codes.flatten(1), bits), scale, low


def reference(
    x: Tensor, bits: int, group_size: int, dim: int, scale_dtype: torch.dtype, rounding: str = "minmax"
) -> tuple[Tensor, Tensor, Tensor]:
    """quantize by plain torch, on any device, without looking for NaN; shapes as in `quantize`."""
    moved = x.movedim(dim, -1)
    parts = quantize_matrix(moved.reshape(-1, moved.shape[-1]), bits, group_size, scale_dtype, rounding)
    return tuple(part.view(*moved.shape[:-1], -1).movedim(-1, dim).contiguous() for part in parts)  # type: ignore[return-value]


def dequantize_reference(
    packed: Tensor,
    scale: Tensor,
    low: Tensor | None,
    bits: int,
    group_size: int,
    dim: int,
    size: int,
    dtype: torch.dtype = torch.float32,
    codebook: str = "",
) -> Tensor:
    """dequantize by plain torch, on any device; shapes as in `dequantize`."""
    codes = packing.unpack_codes(packed.movedim(dim, -1), bits).unflatten(-1, (-1, group_size))
    if codebook:
        step = joined_scales(scale.movedim(dim, -1), None if low is None else low.movedim(dim, -1))
        x = codebook_values(codebook).to(codes.device)[codes.int()] * step[..., None]
        return _round_to(x.flatten(-2)[..., :size], dtype).movedim(-1, dim).contiguous()
    step = scale.movedim(dim, -1).float()
    base = step * -(1 << (bits - 1)) if low is None else low.movedim(dim, -1).float()
    x = codes.float() * step[..., None] + base[..., None]
    return _round_to(x.flatten(-2)[..., :size], dtype).movedim(-1, dim).contiguous()


def coded_rows(x: Tensor, bits: int, group_size: int, symmetric: bool, codebook: str) -> Tensor:
    """x [rows, size], finite, as packed rows with a codebook, whose largest number is the largest magnitude of a group.

    Symmetric ones have powers of two for scales, as MXFP4 does: that of the largest magnitude over that of the largest
    number, which values beyond become (OCP Microscaling Formats v1.0, 6.3).
    """
    size = x.shape[1]
    count = row_sizes.group_count(size, group_size)
    groups = torch.nn.functional.pad(x.float(), (0, count * group_size - size)).unflatten(1, (count, group_size))
    most, top = groups.abs().amax(-1), largest(codebook)
    if symmetric:
        scale = torch.ldexp(torch.ones_like(most), (most.frexp()[1] - math.frexp(top)[1]).clamp(-126, 127))
    else:
        scale = most / top
    codes = nearest_codes(groups / torch.where(scale > 0, scale, 1.0)[..., None], codebook).flatten(1)
    upper, lower = split_scales(scale)
    return packing.pack_rows(packing.pack_codes(codes, bits), upper, None if symmetric else lower)


def _round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 x in dtype; finite values stay finite: the top of a range may lie just beyond the largest number."""
    limit = torch.finfo(dtype).max
    return torch.where(x.isfinite(), x.clamp(-limit, limit), x).to(dtype)


def check(x: Tensor, bits: int, group_size: int, dim: int, scale_dtype: torch.dtype, rounding: str) -> None:
    """ValueError names the argument of quantize that is wrong."""
    row_sizes.check_format("quantize", bits, group_size)
    if x.dtype not in native.DTYPES:
        raise ValueError(f"quantize: x must be fp32, bf16 or fp16, got {x.dtype}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"quantize: dim must be one of x's {x.dim()} dimensions, got {dim}")
    if scale_dtype not in packing.SCALE_DTYPES:
        raise ValueError(f"quantize: scale_dtype must be fp16 or bf16, got {scale_dtype}")
    if rounding not in ROUNDINGS:
        raise ValueError(f"quantize: rounding must be one of {ROUNDINGS}, got {rounding!r}")


def check_packed(
    packed: Tensor, scale: Tensor, low: Tensor | None, bits: int, group_size: int, dim: int, size: int,
    dtype: torch.dtype, codebook: str = "",
) -> None:
    """ValueError names the argument of dequantize that is wrong."""
    row_sizes.check_format("dequantize", bits, group_size)
    if packed.dtype != torch.uint8:
        raise ValueError(f"dequantize: packed must be uint8, got {packed.dtype}")
    if not -packed.dim() <= dim < packed.dim():
        raise ValueError(f"dequantize: dim must be one of packed's {packed.dim()} dimensions, got {dim}")
    if size < 0 or packed.shape[dim] != row_sizes.codes_nbytes(size, bits, group_size):
        wanted = row_sizes.codes_nbytes(size, bits, group_size)
        raise ValueError(f"dequantize: packed must hold {wanted} bytes along {dim}, got shape {tuple(packed.shape)}")
    shape = list(packed.shape)
    shape[dim] = row_sizes.group_count(size, group_size)
    for part, name in ((scale, "scale"), (scale if low is None else low, "low")):
        if list(part.shape) != shape or part.dtype not in packing.SCALE_DTYPES or part.dtype != scale.dtype:
            raise ValueError(f"dequantize: {name} must be fp16 or bf16 {shape}, got {part.dtype} {tuple(part.shape)}")
    if dtype not in native.DTYPES:
        raise ValueError(f"dequantize: dtype must be fp32, bf16 or fp16, got {dtype}")
    if codebook not in CODEBOOKS or (codebook and bits != (8 if codebook == "e4m3" else 4)):
        raise ValueError(f"dequantize: codebook must be one of {CODEBOOKS} for {bits} bits, got {codebook!r}")


def output_shapes(shape: tuple[int, ...], bits: int, group_size: int, dim: int) -> tuple[list[int], list[int]]:
    codes, groups = list(shape), list(shape)
    codes[dim] = row_sizes.codes_nbytes(shape[dim], bits, group_size)
    groups[dim] = row_sizes.group_count(shape[dim], group_size)
    return codes, groups


def refuse_unheld(x: Tensor, scale_dtype: torch.dtype) -> None:
    """The ValueError for an x of which some group cannot be held."""
    if not x.isfinite().all():
        raise ValueError("quantize: x holds NaN or infinity")
    limit = torch.finfo(scale_dtype).max
    advice = "; scale_dtype=torch.bfloat16 holds more" if scale_dtype == torch.float16 else ""
    raise ValueError(f"quantize: x has a range beyond {limit:.3g}, which {scale_dtype} cannot hold{advice}")
