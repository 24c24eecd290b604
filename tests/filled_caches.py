"""Caches filled at random for tests of attention: every byte that was not written is 0xFF, which reads as NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forebay.kernels.attention.attention import reference as attention
from forebay.kernels.cache.kv_append_q import reference as kv_append_q
from forebay.kernels.formats import row_sizes

LIMIT = {torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5}


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected magnitude; NaN where one of them is not finite."""
    return ((found.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


@dataclass(frozen=True)
class FilledCache:
    """Sequences of `ends` positions: values [B, Hkv, L, D] as they are (bits 0), or packed rows [B, Hkv, L, R]."""

    k: Tensor
    v: Tensor
    ends: tuple[int, ...]
    dim: int
    bits: int = 0
    group: int = 0

    @property
    def start(self) -> Tensor:
        """Where the one query of each sequence stands: int64 [B]; -1: it sees nothing."""
        return torch.tensor(self.ends) - 1

    def queries(self, heads: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
        """q [B, H, D], one for each sequence."""
        made = torch.randn(len(self.ends), heads, self.dim, generator=torch.Generator().manual_seed(seed))
        return made.to(dtype)

    def expected(self, q: Tensor, window: int = 0, softcap: float = 0.0, values: torch.dtype = torch.float64) -> Tensor:
        """Attention of q [B, H, D] by the definition, of packed rows over what they stand for, rounded to `values`."""
        k, v = self.k, self.v
        if self.bits:
            k, v = (kv_append_q.unpack(c, self.dim, self.bits, self.group).to(values) for c in (k, v))
        scale = self.dim**-0.5
        return attention.reference(q[:, :, None], k, v, self.start.clamp(min=0), scale, window, softcap)[:, 0]


def native_cache(
    ends: tuple[int, ...], kv_heads: int, dim: int, dtype: torch.dtype, strength: float = 1.0
) -> FilledCache:
    """K ~ strength N(0, 1), V ~ N(0, 1), as tensors that are not contiguous."""
    generator = torch.Generator().manual_seed(dim)
    shape = (2, len(ends), max(ends) + 3, kv_heads, dim)
    caches = torch.full((*shape[:-1], dim * dtype.itemsize), 0xFF, dtype=torch.uint8).view(dtype).transpose(2, 3)
    for cache, size in zip(caches, (strength, 1.0), strict=True):
        for b, end in enumerate(ends):
            cache[b, :, :end] = (size * torch.randn(kv_heads, end, dim, generator=generator)).to(dtype)
    return FilledCache(caches[0], caches[1], ends, dim)


def packed_cache(
    ends: tuple[int, ...], kv_heads: int, dim: int, bits: int, group: int = 0, strength: float = 1.0
) -> FilledCache:
    """As native_cache, with spare rows between heads and a first element that stands out; group 0: the usual one."""
    generator = torch.Generator().manual_seed(dim + bits)
    group = group or row_sizes.cache_group_size(dim, bits)
    row, length = row_sizes.row_nbytes(dim, bits, group, row_sizes.CACHE_ALIGN), max(ends) + 3
    caches = torch.full((2, len(ends), kv_heads, length + 2, row), 0xFF, dtype=torch.uint8)[..., :length, :]
    for cache, size in zip(caches, (strength, 1.0), strict=True):
        for b, end in enumerate(ends):
            x = size * torch.randn(kv_heads, end, dim, generator=generator)
            x[..., 0] += 3.0
            cache[b, :, :end] = kv_append_q.pack(x, bits, group)
    return FilledCache(caches[0], caches[1], ends, dim, bits, group)


def decode(
    cache: FilledCache, q: Tensor, softmax: Any, window: int = 0, softcap: float = 0.0, splits: int | None = 3
) -> Tensor:
    """What Triton's decode attention gives for q [B, H, D]: a SoftmaxRange, and so many shares of a sequence."""
    from forebay.kernels.attention.decode_attention import gpu
    from forebay.kernels.attention.scoring import Scoring
    from forebay.kernels.gpu_support.cache_rows import packed_view
    from forebay.kernels.gpu_support.cache_tiles import AttendedCache, contiguous_view

    k, v = cache.k, cache.v
    view = packed_view(k, v, cache.dim, cache.bits, cache.group) if cache.bits else contiguous_view(k, v)
    attended = AttendedCache(view, k.shape[1], k.shape[2], 2 * k.shape[3] * k.itemsize, cache.start)
    out = torch.full_like(q, math.nan)
    gpu.bind_view(q, attended, Scoring(cache.dim**-0.5, window, softcap), softmax, splits, out)()
    return out
