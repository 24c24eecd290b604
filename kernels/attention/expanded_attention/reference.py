"""The definition of `forebay::expanded_attention`, and the checks of its arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from forebay.kernels.attention.attention.reference import reference as attention
from forebay.kernels.attention.scoring import Scoring
from forebay.kernels.cache.kv_append_q.reference import check_format, unpack
from forebay.kernels.cpu_support import native
from forebay.kernels.formats import row_sizes


class RowCodes(NamedTuple):
    """Codes of packed rows, as of `attention_q`: their bits, 0 for rows as they are, and values of a group."""

    bits: int = 0
    group: int = 0


PLAIN = RowCodes()


class ExpandedSizes(NamedTuple):
    """Sizes of a use: of queries [batch, heads, queries, dim], `length` rows of `rank` numbers and dim - plain others,
    and of what each head makes of a latent, `plain` numbers of a key and `value` of a value."""

    batch: int
    heads: int
    queries: int
    length: int
    rank: int
    dim: int
    plain: int
    value: int

    @property
    def made(self) -> int:
        """Numbers that a head makes of a latent."""
        return self.plain + self.value


def reference(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, scoring: Scoring, up: Tensor, plain: int,
    codes: RowCodes = PLAIN, dtype: torch.dtype = torch.float64,
) -> Tensor:
    """In dtype by the definition, on any device: q [B, H, S, plain + rotated], rows [B, 1, L, rank + rotated] or
    packed ones, up [H, plain + value, rank] -> [B, S, H, value]."""
    del v
    k = unpack(k, up.shape[2] + q.shape[3] - plain, *codes) if codes.bits else k
    keys, values = expanded(k.to(dtype), up.to(dtype), plain)
    width, value = keys.shape[-1], values.shape[-1]
    most = max(width, value)  # zeros behind the narrower ones change no result
    keys, values, q = (torch.nn.functional.pad(t, (0, most - t.shape[-1])) for t in (keys, values, q))
    return attention(q, keys, values, start, *scoring, dtype)[..., :value]


def expanded(rows: Tensor, up: Tensor, plain: int) -> tuple[Tensor, Tensor]:
    """Keys [B, H, L, plain + rotated] and values [B, H, L, value] of rows [B, 1, L, rank + rotated]."""
    rank = up.shape[2]
    made = torch.matmul(rows[..., :rank], up.mT)  # [B, H, L, plain + value]
    turned = rows[..., rank:].expand(-1, up.shape[0], -1, -1)
    return torch.cat((made[..., :plain], turned), -1), made[..., plain:]


def fail(argument: str, problem: str) -> None:
    raise ValueError(f"expanded_attention: {argument} {problem}")


def check(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, up: Tensor, plain: int, codes: RowCodes = PLAIN
) -> None:
    """ValueError names the argument whose shape or dtype is wrong."""
    for tensor, name, dims in ((q, "q", 4), (k, "k", 4), (up, "up", 3)):
        if tensor.dim() != dims:
            fail(name, f"must have {dims} dimensions, got shape {tuple(tensor.shape)}")
        if codes.bits and tensor is k:
            check_format("expanded_attention", *codes)
            if k.dtype != torch.uint8:
                fail(name, f"must be uint8, got {k.dtype}")
        elif tensor.dtype not in native.DTYPES or tensor.dtype != q.dtype:
            fail(name, f"must be fp32, bf16 or fp16 and of q's dtype {q.dtype}, got {tensor.dtype}")
    batch, heads, _, dim = q.shape
    if v.data_ptr() != k.data_ptr() or v.shape != k.shape or v.stride() != k.stride():
        fail("v", "must be k: keys and values are made of the same rows")
    if up.shape[0] != heads or not 0 < plain <= min(dim, up.shape[1]):
        fail("up", f"must have q's {heads} heads, {plain} rows of each for keys and others for values, got "
                   f"{tuple(up.shape)}")
    width = up.shape[2] + dim - plain
    width = row_sizes.row_nbytes(width, *codes, row_sizes.CACHE_ALIGN) if codes.bits else width
    if k.shape[:2] != (batch, 1) or k.shape[3] != width:
        fail("k", f"must be [{batch}, 1, L, {width}] as q and up ask, got shape {tuple(k.shape)}")
    if start.dtype != torch.int64 or start.shape != (batch,):
        fail("start", f"must be int64 of shape {(batch,)}, got {start.dtype} {tuple(start.shape)}")
