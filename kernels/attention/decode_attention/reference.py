"""The definition of `forebay::decode_attention`, and the checks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.attention.attention import reference as attention_reference
from forebay.kernels.formats import paged
from forebay.kernels.formats.paged import BlockLayout

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
    out = attention_reference.reference(q[:, :, None], k, v, (lengths - 1).clamp(min=0), scale, window, softcap, dtype)
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
