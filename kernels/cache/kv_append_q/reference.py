"""The definition of `forebay::kv_append_q`, and the checks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.cpu_support import native
from forebay.kernels.formats import packing, row_sizes
from forebay.kernels.quantization.quantize import reference as quantize_module

SCALE_DTYPE = torch.float16
MOST_ROTATED = 32  # elements of a block


def _hadamard(x: Tensor) -> Tensor:
    """x [..., D] times the Hadamard matrix of +-1 of each block of `rotation_size(D)`; twice is that size times x."""
    stride = 1
    while stride < rotation_size(x.shape[-1]):
        a, b = x.unflatten(-1, (-1, 2, stride)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        stride *= 2
    return x


def rotation_size(head_dim: int) -> int:
    """Elements of a rotated block: the largest power of two, at most MOST_ROTATED, that divides head_dim."""
    return min(MOST_ROTATED, head_dim & -head_dim)


def _factors(head_dim: int) -> tuple[float, float]:
    """Return the factors of rows when stored, and when read: powers of two, which do not round."""
    power = rotation_size(head_dim).bit_length() - 1
    return 2.0 ** -((power + 1) // 2), 2.0 ** -(power // 2)


def _refitted(rows: Tensor, packed: Tensor, scale: Tensor, low: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """The 4-bit groups of fp32 rows [N, D], each with the range that fits its codes best and codes in that range, where
    that lowers the squared error."""
    count, size = scale.shape[1], rows.shape[1]

    def grouped(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, count * group - size)).unflatten(1, (count, group))

    def error(codes: Tensor, scale: Tensor, low: Tensor) -> Tensor:
        made = codes.float() * scale.float()[..., None] + low.float()[..., None]
        return ((made.double() - x) * valid).square().sum(-1)

    x, valid = grouped(rows).double(), grouped(torch.ones_like(rows[:1])).double()
    n, codes = valid.sum(-1), packing.unpack_codes(packed, 4).unflatten(1, (count, group)).double()
    q, total = codes.sum(-1), x.sum(-1)
    fitted = (n * (codes * x).sum(-1) - q * total) / (n * codes.square().sum(-1) - q.square())
    new_scale = fitted.float().to(SCALE_DTYPE)
    new_low = ((total - fitted * q) / n).float().to(SCALE_DTYPE)
    new = ((x.float() - new_low.float()[..., None]) / new_scale.float()[..., None]).round().clamp(0, 15) * valid
    better = (new_scale > 0) & new_scale.isfinite() & new_low.isfinite()
    better &= error(new, new_scale, new_low) < error(codes, scale, low)
    codes = torch.where(better[..., None], new, codes).to(torch.uint8)
    return (packing.pack_codes(codes.flatten(1), 4), torch.where(better, new_scale, scale),
            torch.where(better, new_low, low))


def pack(x: Tensor, bits: int, group: int) -> Tensor:
    """x [..., D] as packed cache rows uint8 [..., R], by plain torch on any device; NaN where a group is not held."""
    rows = _hadamard(x.reshape(-1, x.shape[-1]).float()) * _factors(x.shape[-1])[0]
    parts = quantize_module.reference(rows, bits, group, 1, SCALE_DTYPE)
    if bits == 4:
        parts = _refitted(rows, *parts, group)
    return packing.pack_rows(*parts, align=row_sizes.CACHE_ALIGN).view(*x.shape[:-1], -1)


def unpack(cache: Tensor, head_dim: int, bits: int, group: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [..., D] of packed cache rows [..., R], rotated back, by plain torch on any device."""
    parts = packing.unpack_rows(cache, head_dim, bits, group, SCALE_DTYPE)
    rows = _hadamard(quantize_module.dequantize_reference(*parts, bits, group, -1, head_dim))
    limit = torch.finfo(dtype).max
    return rows.mul_(_factors(head_dim)[1]).clamp_(-limit, limit).to(dtype)


def reference(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, bits: int, group: int
) -> tuple[Tensor, Tensor]:
    """New caches [B, Hkv, L, R] with k and v [B, Hkv, S, D] at positions start[b] .. start[b] + S - 1, or start[b, s];
    on any device."""
    made = k_cache.clone(), v_cache.clone()
    for cache, x in zip(made, (k, v), strict=True):
        put(cache, pack(x, bits, group), positions_of(start, x.shape[2]))
    return made


def positions_of(start: Tensor, new: int) -> Tensor:
    """The positions [B, S] of new tokens, from those of the first ones [B] or as they are."""
    return start if start.dim() == 2 else start[:, None] + torch.arange(new, device=start.device)


def put(cache: Tensor, rows: Tensor, places: Tensor) -> None:
    """Copy packed rows [B, Hkv, S, R] to their positions [B, S] in a cache [B, Hkv, L, R]."""
    for b, place in enumerate(places):
        cache[b, :, place] = rows[b]


def fail(argument: str, problem: str) -> None:
    raise ValueError(f"kv_append_q: {argument} {problem}")


def check_format(op: str, bits: int, group: int) -> None:
    """ValueError, opened by op, unless cache rows of this format exist."""
    row_sizes.check_format(op, bits, group)
    if group % 4:
        raise ValueError(f"{op}: group must be a multiple of 4, got {group}")


def check(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, bits: int, group: int) -> None:
    """ValueError names the argument whose shape or dtype is wrong; positions are checked where they are used."""
    check_format("kv_append_q", bits, group)
    for new, cache, name in ((k, k_cache, "k"), (v, v_cache, "v")):
        if new.dim() != 4 or new.dtype not in native.DTYPES or new.dtype != k.dtype or new.shape[:3] != k.shape[:3]:
            fail(name, f"must be [B, Hkv, S, D] of fp32, bf16 or fp16 like k, got {new.dtype} {tuple(new.shape)}")
        wanted = (*k.shape[:2], k_cache.shape[2] if k_cache.dim() == 4 else "L",
                  row_sizes.row_nbytes(new.shape[3], bits, group, row_sizes.CACHE_ALIGN))  # fmt: skip
        if cache.dtype != torch.uint8 or tuple(cache.shape) != wanted:
            fail(f"{name}_cache", f"must be uint8 {wanted}, got {cache.dtype} {tuple(cache.shape)}")
    each = k.shape[0], k.shape[2]
    if start.dtype != torch.int64 or start.shape not in (each[:1], each):
        fail("start", f"must be int64 of shape {tuple(each[:1])} or {each}, got {start.dtype} {tuple(start.shape)}")
