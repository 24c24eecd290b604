"""`forebay::prefill_attention` and `forebay::prefill_attention_paged`: causal attention of a chunk of new queries.

The definition is that of `forebay::attention`: query s of sequence b stands at position p = start[b] + s and sees
t <= p, with window w > 0 also t > p - w, with w < 0 also t >= p // -w * -w (chunks of -w); head h reads KV head
h // (H / Hkv); with softcap c > 0 a score x becomes c tanh(x / c). K and V of the new positions are in the cache
already. The cache is a pair of tensors [B, Hkv, L, D], or the blocks of a pool that a table names
(`paged.BlockLayout`), whatever their format.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.attention.attention import cpu as attention_cpu
from forebay.kernels.attention.attention import reference as attention_reference
from forebay.kernels.attention.costs import attention_cost
from forebay.kernels.attention.prefill_attention.reference import check_paged, fail, paged_reference, reference
from forebay.kernels.attention.scoring import Scoring
from forebay.kernels.formats import paged
from forebay.kernels.formats.paged import BlockLayout
from forebay.kernels.operator import Cost, Operator, Use, nbytes_of


@torch.library.custom_op("forebay::prefill_attention", mutates_args=(), device_types="cpu")
def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, scale: float, window: int = 0, softcap: float = 0.0
) -> Tensor:
    """q [B, H, S, D], caches k and v [B, Hkv, L, D], start int64 [B] -> [B, S, H, D]; window 0 and softcap 0: none.

    ValueError names the argument that is wrong; on a GPU the values of start are not looked at, and must be right.
    """
    attention_reference.check(q, k, v, start)
    batch, heads, queries, dim = q.shape
    out = q.new_empty(batch, queries, heads, dim)
    attention_cpu.attention_out(q, k, v, start.contiguous(), scale, window, softcap, out)
    return out


@prefill_attention.register_kernel("cuda")
def _(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, scale: float, window: int = 0, softcap: float = 0.0
) -> Tensor:  # fmt: skip
    from forebay.kernels.attention.prefill_attention import gpu

    attention_reference.check(q, k, v, start)
    batch, heads, queries, dim = q.shape
    out = q.new_empty(batch, queries, heads, dim)
    gpu.prefill_attention(q, k, v, start, Scoring(scale, window, softcap), out)
    return out


@prefill_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, scale: float, window: int = 0, softcap: float = 0.0
) -> Tensor:  # fmt: skip
    batch, heads, queries, dim = q.shape
    return q.new_empty(batch, queries, heads, dim)


@torch.library.custom_op("forebay::prefill_attention_paged", mutates_args=(), device_types="cpu")
def prefill_attention_paged(
    q: Tensor,
    pool: Tensor,
    table: Tensor,
    start: Tensor,
    kv_heads: int,
    block_tokens: int,
    format: str,
    group_size: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """q fp16 or bf16 [B, H, S, D], pool uint8 [blocks, record], table int32 [B, M], start int64 [B] -> [B, S, H, D].

    kv_heads, block_tokens, format and group_size are a `paged.BlockLayout` of q's dtype. ValueError names the argument
    that is wrong; on a GPU start and table entries are not looked at, and must be right.
    """
    layout = BlockLayout(block_tokens, kv_heads, q.shape[-1], format, q.dtype, group_size)
    check_paged(q, pool, table, start, layout)
    batch, heads, queries, dim = q.shape
    if start.numel() and int(start.min()) < 0:
        fail("prefill_attention_paged", "start", f"must not be negative, got {start.tolist()}")
    paged.check_used_blocks("prefill_attention_paged", pool, table, start + queries, layout)
    out = q.new_empty(batch, queries, heads, dim)
    if out.numel():
        blocks = -(-(int(start.max()) + queries) // block_tokens)
        k, v = paged.read(pool, layout, table[:, :blocks], q.dtype)
        attention_cpu.attention_out(q, k, v, start.contiguous(), scale, window, softcap, out)
    return out


@prefill_attention_paged.register_kernel("cuda")
def _(
    q: Tensor, pool: Tensor, table: Tensor, start: Tensor, kv_heads: int, block_tokens: int, format: str,
    group_size: int, scale: float, window: int = 0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    from forebay.kernels.attention.prefill_attention import gpu

    layout = BlockLayout(block_tokens, kv_heads, q.shape[-1], format, q.dtype, group_size)
    check_paged(q, pool, table, start, layout)
    batch, heads, queries, dim = q.shape
    out = q.new_empty(batch, queries, heads, dim)
    gpu.prefill_attention_paged(q, pool, table, start, layout, Scoring(scale, window, softcap), out)
    return out


@prefill_attention_paged.register_fake
def _(
    q: Tensor, pool: Tensor, table: Tensor, start: Tensor, kv_heads: int, block_tokens: int, format: str,
    group_size: int, scale: float, window: int = 0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    batch, heads, queries, dim = q.shape
    return q.new_empty(batch, queries, heads, dim)


def _paged_cost(use: Use) -> Cost:
    """As if every sequence filled its row of the table."""
    q, pool, table, start, _, tokens = use.args[:6]
    (batch, heads, queries, width), blocks = q.shape, table.shape[1]
    flops = 2 * batch * heads * width * queries * (2 * blocks * tokens - queries + 1)
    return Cost(flops, nbytes_of(q, table, start) + batch * blocks * pool.shape[1], nbytes_of(*use.out))


PREFILL_ATTENTION = Operator(
    torch.ops.forebay.prefill_attention.default, reference, attention_cost, caches=("k", "v"), timed_as="attention"
)
PREFILL_ATTENTION_PAGED = Operator(torch.ops.forebay.prefill_attention_paged.default, paged_reference, _paged_cost)
