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

from forebay.kernels import attention, paged
from forebay.kernels.paged import BlockLayout

reference = attention.reference


def paged_reference(
    q: Tensor,
    pool: Tensor,
    table: Tensor,
    start: Tensor,
    layout: BlockLayout,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Attention in dtype by the definition, on any device: q [B, H, S, D] -> [B, S, H, D]."""
    k, v = paged.read(pool, layout, table, dtype)
    return attention.reference(q, k, v, start, scale, window, softcap, dtype)


def _fail(op: str, argument: str, problem: str) -> None:
    raise ValueError(f"{op}: {argument} {problem}")


def check_paged(q: Tensor, pool: Tensor, table: Tensor, start: Tensor, layout: BlockLayout) -> None:
    """ValueError names the argument of the paged operator whose dtype, shape or value is wrong."""
    op = "prefill_attention_paged"
    if q.dim() != 4 or q.dtype not in (torch.float16, torch.bfloat16):
        _fail(op, "q", f"must be fp16 or bf16 [B, H, S, D], got {q.dtype} {tuple(q.shape)}")
    paged.check_pool(op, pool, layout)
    if q.shape[1] % layout.kv_heads:
        _fail(op, "kv_heads", f"must divide q's {q.shape[1]} heads, got {layout.kv_heads}")
    if q.shape[3] > 1 and q.stride(3) != 1:
        _fail(op, "q", f"must have a contiguous last dimension, got strides {q.stride()}")
    paged.check_table(op, table, q.shape[0], q.device)
    if start.dtype != torch.int64 or start.shape != q.shape[:1]:
        _fail(op, "start", f"must be int64 of shape {tuple(q.shape[:1])}, got {start.dtype} {tuple(start.shape)}")
    for tensor, name in ((pool, "pool"), (start, "start")):
        if tensor.device != q.device:
            _fail(op, name, f"must be on {q.device}, got {tensor.device}")


@torch.library.custom_op("forebay::prefill_attention", mutates_args=(), device_types="cpu")
def prefill_attention(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, scale: float, window: int = 0, softcap: float = 0.0
) -> Tensor:
    """q [B, H, S, D], caches k and v [B, Hkv, L, D], start int64 [B] -> [B, S, H, D]; window 0 and softcap 0: none.

    ValueError names the argument that is wrong; on a GPU the values of start are not looked at, and must be right.
    """
    attention.check(q, k, v, start)
    batch, heads, queries, dim = q.shape
    out = q.new_empty(batch, queries, heads, dim)
    attention.attention_out(q, k, v, start.contiguous(), scale, window, softcap, out)
    return out


@prefill_attention.register_kernel("cuda")
def _(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, scale: float, window: int = 0, softcap: float = 0.0
) -> Tensor:  # fmt: skip
    from forebay.kernels.gpu import prefill_attention as gpu

    attention.check(q, k, v, start)
    batch, heads, queries, dim = q.shape
    out = q.new_empty(batch, queries, heads, dim)
    gpu.prefill_attention(q, k, v, start, scale, window, softcap, out)
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
        _fail("prefill_attention_paged", "start", f"must not be negative, got {start.tolist()}")
    paged.check_used_blocks("prefill_attention_paged", pool, table, start + queries, layout)
    out = q.new_empty(batch, queries, heads, dim)
    if out.numel():
        blocks = -(-(int(start.max()) + queries) // block_tokens)
        k, v = paged.read(pool, layout, table[:, :blocks], q.dtype)
        attention.attention_out(q, k, v, start.contiguous(), scale, window, softcap, out)
    return out


@prefill_attention_paged.register_kernel("cuda")
def _(
    q: Tensor, pool: Tensor, table: Tensor, start: Tensor, kv_heads: int, block_tokens: int, format: str,
    group_size: int, scale: float, window: int = 0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    from forebay.kernels.gpu import prefill_attention as gpu

    layout = BlockLayout(block_tokens, kv_heads, q.shape[-1], format, q.dtype, group_size)
    check_paged(q, pool, table, start, layout)
    batch, heads, queries, dim = q.shape
    out = q.new_empty(batch, queries, heads, dim)
    gpu.prefill_attention_paged(q, pool, table, start, layout, scale, window, softcap, out)
    return out


@prefill_attention_paged.register_fake
def _(
    q: Tensor, pool: Tensor, table: Tensor, start: Tensor, kv_heads: int, block_tokens: int, format: str,
    group_size: int, scale: float, window: int = 0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    batch, heads, queries, dim = q.shape
    return q.new_empty(batch, queries, heads, dim)
