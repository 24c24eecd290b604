"""`forebay::decode_attention`: one new query per sequence over the blocks of a paged cache, whatever their format.

The query of sequence b stands at position lengths[b] - 1 and sees positions t < lengths[b], with window
w > 0 only the last w of them, with w < 0 those of its own chunk of -w; K and V of its own position are in the cache
already. Head h reads KV head h // (H / Hkv), and
with softcap c > 0 a score x becomes c tanh(x / c). A sequence of length 0 gives zeros.

phi, low and high describe the scores of a layer (FlashDecoding++Next, section III; `forebay calibrate` measures them):
where the largest score x of a row lies in phi + low < x < phi + high, partial softmaxes share the maximum phi. high <=
low says that the range is too wide, and every row takes the synchronised softmax. The result is the same but for
rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.attention.attention import cpu as attention_cpu
from forebay.kernels.attention.decode_attention.reference import check, reference
from forebay.kernels.attention.scoring import Scoring, SoftmaxRange
from forebay.kernels.formats import paged
from forebay.kernels.formats.paged import BlockLayout
from forebay.kernels.operator import Cost, Operator, Use, nbytes_of


@torch.library.custom_op("forebay::decode_attention", mutates_args=(), device_types="cpu")
def decode_attention(
    q: Tensor,
    pool: Tensor,
    table: Tensor,
    lengths: Tensor,
    kv_heads: int,
    block_tokens: int,
    format: str,
    group_size: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    phi: float = 0.0,
    low: float = 0.0,
    high: float = 0.0,
) -> Tensor:
    """q fp16 or bf16 [B, H, D], pool uint8 [blocks, record], table int32 [B, M], lengths int64 [B] -> [B, H, D].

    kv_heads, block_tokens, format and group_size are a `paged.BlockLayout` of q's dtype. ValueError names the argument
    that is wrong; on a GPU lengths and table entries are not looked at, and must be right.
    """
    layout = BlockLayout(block_tokens, kv_heads, q.shape[-1], format, q.dtype, group_size)
    check(q, pool, table, lengths, layout, low, high)
    paged.check_used_blocks("decode_attention", pool, table, lengths, layout)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    blocks = -(-int(lengths.max()) // block_tokens) if lengths.numel() else 0
    kept = lengths > 0
    if blocks == 0 or q.numel() == 0:
        return out
    k, v = paged.read(pool, layout, table[kept, :blocks], q.dtype)
    found = torch.empty(k.shape[0], 1, *q.shape[1:], dtype=q.dtype)
    start = (lengths[kept] - 1).contiguous()
    attention_cpu.attention_out(q[kept][:, :, None], k, v, start, scale, window, softcap, found)
    out[kept] = found[:, 0]
    return out


@decode_attention.register_kernel("cuda")
def _(
    q: Tensor, pool: Tensor, table: Tensor, lengths: Tensor, kv_heads: int, block_tokens: int, format: str,
    group_size: int, scale: float, window: int = 0, softcap: float = 0.0, phi: float = 0.0, low: float = 0.0,
    high: float = 0.0,
) -> Tensor:  # fmt: skip
    from forebay.kernels.attention.decode_attention import gpu

    layout = BlockLayout(block_tokens, kv_heads, q.shape[-1], format, q.dtype, group_size)
    check(q, pool, table, lengths, layout, low, high)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    scoring, softmax = Scoring(scale, window, softcap), SoftmaxRange(phi, low, high)
    gpu.decode_attention(q, pool, table, lengths, layout, scoring, softmax, out)
    return out


@decode_attention.register_fake
def _(
    q: Tensor, pool: Tensor, table: Tensor, lengths: Tensor, kv_heads: int, block_tokens: int, format: str,
    group_size: int, scale: float, window: int = 0, softcap: float = 0.0, phi: float = 0.0, low: float = 0.0,
    high: float = 0.0,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape)


def _cost(use: Use) -> Cost:
    """As if every sequence filled its row of the table."""
    q, pool, table, lengths, _, tokens = use.args[:6]
    (batch, heads, width), blocks = q.shape, table.shape[1]
    read = nbytes_of(q, table, lengths) + batch * blocks * pool.shape[1]
    return Cost(4 * batch * heads * width * blocks * tokens, read, nbytes_of(*use.out))


DECODE_ATTENTION = Operator(torch.ops.forebay.decode_attention.default, reference, _cost)
