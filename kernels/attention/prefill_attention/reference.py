"""The definition of `forebay::prefill_attention`, and the checks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.attention.attention import reference as attention_reference
from forebay.kernels.formats import paged
from forebay.kernels.formats.paged import BlockLayout

reference = attention_reference.reference


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
    return attention_reference.reference(q, k, v, start, scale, window, softcap, dtype)


def fail(op: str, argument: str, problem: str) -> None:
    raise ValueError(f"{op}: {argument} {problem}")


def check_paged(q: Tensor, pool: Tensor, table: Tensor, start: Tensor, layout: BlockLayout) -> None:
    """ValueError names the argument of the paged operator whose dtype, shape or value is wrong."""
    op = "prefill_attention_paged"
    if q.dim() != 4 or q.dtype not in (torch.float16, torch.bfloat16):
        fail(op, "q", f"must be fp16 or bf16 [B, H, S, D], got {q.dtype} {tuple(q.shape)}")
    paged.check_pool(op, pool, layout)
    if q.shape[1] % layout.kv_heads:
        fail(op, "kv_heads", f"must divide q's {q.shape[1]} heads, got {layout.kv_heads}")
    if q.shape[3] > 1 and q.stride(3) != 1:
        fail(op, "q", f"must have a contiguous last dimension, got strides {q.stride()}")
    paged.check_table(op, table, q.shape[0], q.device)
    if start.dtype != torch.int64 or start.shape != q.shape[:1]:
        fail(op, "start", f"must be int64 of shape {tuple(q.shape[:1])}, got {start.dtype} {tuple(start.shape)}")
    for tensor, name in ((pool, "pool"), (start, "start")):
        if tensor.device != q.device:
            fail(op, name, f"must be on {q.device}, got {tensor.device}")
