"""The cache format of `test_cache_format.py` and of docs/adding.md, as a module of its own."""

import torch
from torch import Tensor

from forebay.kernels.cache.rows_by_torch import cache_format_by_torch
from forebay.kernels.formats.table import CacheFormat

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def pack(x: Tensor) -> Tensor:
    """fp8 with a scale for each row: D bytes of values, then 4 of the scale."""
    scale = (x.float().abs().amax(-1, keepdim=True) / LARGEST).clamp_min(1e-30)
    values = (x.float() / scale).to(torch.float8_e4m3fn)
    return torch.cat((values.view(torch.uint8), scale.view(torch.uint8)), -1)


def unpack(rows: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    scale = rows[..., head_dim:].contiguous().view(torch.float32)
    return (rows[..., :head_dim].view(torch.float8_e4m3fn).float() * scale).to(dtype)


def register_fp8() -> CacheFormat:
    """To be called once, before any model is wrapped."""
    return cache_format_by_torch("fp8", row=lambda head_dim: head_dim + 4, error=0.03, pack=pack, unpack=unpack)
