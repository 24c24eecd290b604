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

from forebay.kernels import attention, paged
from forebay.kernels.paged import BlockLayout

# exp(x - phi) is multiplied with V in V's dtype: fp16 holds exp(-9) to exp(11) to within 2^-11, bf16 has fp32's range,
# of which sums over long sequences leave exp(-60) to exp(60).
HELD: dict[torch.dtype, tuple[float, float]] = {torch.float16: (-9.0, 11.0), torch.bfloat16: (-60.0, 60.0)}


def reference(
    q: Tensor,
    pool: Tensor,
    table: Tensor,
    lengths: Tensor,
    layout: BlockLayout,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Attention in dtype by the definition, on any device: q [B, H, D] -> [B, H, D]."""
    k, v = paged.read(pool, layout, table, dtype)
    out = attention.reference(q[:, :, None], k, v, (lengths - 1).clamp(min=0), scale, window, softcap, dtype)
    return out[:, 0].masked_fill((lengths == 0)[:, None, None], 0.0)


def _fail(argument: str, problem: str) -> None:
    raise ValueError(f"decode_attention: {argument} {problem}")


def check(
    q: Tensor, pool: Tensor, table: Tensor, lengths: Tensor, layout: BlockLayout, low: float, high: float
) -> None:
    """ValueError names the argument whose dtype, shape or value is wrong."""
    if q.dim() != 3 or q.dtype not in (torch.float16, torch.bfloat16):
        _fail("q", f"must be fp16 or bf16 [B, H, D], got {q.dtype} {tuple(q.shape)}")
    paged.check_pool("decode_attention", pool, layout)
    if q.shape[1] % layout.kv_heads:
        _fail("kv_heads", f"must divide q's {q.shape[1]} heads, got {layout.kv_heads}")
    if q.shape[2] > 1 and q.stride(2) != 1:
        _fail("q", f"must have a contiguous last dimension, got strides {q.stride()}")
    paged.check_table("decode_attention", table, q.shape[0], q.device)
    if lengths.dtype != torch.int64 or lengths.shape != q.shape[:1]:
        _fail("lengths", f"must be int64 of shape {tuple(q.shape[:1])}, got {lengths.dtype} {tuple(lengths.shape)}")
    for tensor, name in ((pool, "pool"), (lengths, "lengths")):
        if tensor.device != q.device:
            _fail(name, f"must be on {q.device}, got {tensor.device}")
    least, most = HELD[q.dtype]
    if high > low and not (least <= low and high <= most):
        _fail("high" if least <= low else "low", f"must keep exp within {q.dtype}: {least} <= low < high <= {most}")


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
    attention.attention_out(q[kept][:, :, None], k, v, (lengths[kept] - 1).contiguous(), scale, window, softcap, found)
    out[kept] = found[:, 0]
    return out


@decode_attention.register_kernel("cuda")
def _(
    q: Tensor, pool: Tensor, table: Tensor, lengths: Tensor, kv_heads: int, block_tokens: int, format: str,
    group_size: int, scale: float, window: int = 0, softcap: float = 0.0, phi: float = 0.0, low: float = 0.0,
    high: float = 0.0,
) -> Tensor:  # fmt: skip
    from forebay.kernels.gpu import decode_attention as gpu

    layout = BlockLayout(block_tokens, kv_heads, q.shape[-1], format, q.dtype, group_size)
    check(q, pool, table, lengths, layout, low, high)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    gpu.decode_attention(q, pool, table, lengths, layout, scale, window, softcap, phi, low, high, out)
    return out


@decode_attention.register_fake
def _(
    q: Tensor, pool: Tensor, table: Tensor, lengths: Tensor, kv_heads: int, block_tokens: int, format: str,
    group_size: int, scale: float, window: int = 0, softcap: float = 0.0, phi: float = 0.0, low: float = 0.0,
    high: float = 0.0,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape)
