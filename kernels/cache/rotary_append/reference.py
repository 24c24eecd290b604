"""The definition of `forebay::rotary_append`, and the checks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.kernels.cache.kv_append import reference as kv_append_reference
from forebay.kernels.formats import paged
from forebay.kernels.formats.paged import BlockLayout
from forebay.kernels.positions.rotary import reference as rotary_reference


def reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, start: Tensor, k_cache: Tensor, v_cache: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(q turned, new k_cache, new v_cache) by plain torch, on any device."""
    turned = rotary_reference.reference(k, cos, sin)
    return rotary_reference.reference(q, cos, sin), *kv_append_reference.reference(k_cache, v_cache, turned, v, start)


def paged_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pool: Tensor, layout: BlockLayout
) -> tuple[Tensor, Tensor]:
    """(q turned, new pool) by plain torch, on any device."""
    made = pool.clone()
    write_rows(made, layout, slots, rotary_reference.reference(k, cos, sin), v)
    return rotary_reference.reference(q, cos, sin), made


def write_rows(pool: Tensor, layout: BlockLayout, slots: Tensor, k: Tensor, v: Tensor) -> None:
    slots = torch.where(slots < pool.shape[0] * layout.tokens, slots, -1)
    paged.write(pool, layout, slots.flatten(), k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1))


def fail(op: str, argument: str, problem: str) -> None:
    raise ValueError(f"{op}: {argument} {problem}")


def check_queries(op: str, q: Tensor, k: Tensor) -> None:
    """ValueError unless q [B, H, S, D] suits k [B, Hkv, S, D]."""
    if q.dim() != 4 or k.dim() != 4 or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        fail(op, "q", f"must be [B, H, S, D] with B, S and D of k {tuple(k.shape)}, got shape {tuple(q.shape)}")
    if q.dtype != k.dtype:
        fail(op, "q", f"must be of k's dtype {k.dtype}, got {q.dtype}")


def check_paged(op: str, k: Tensor, v: Tensor, slots: Tensor, pool: Tensor, layout: BlockLayout) -> None:
    """ValueError names the argument whose shape or dtype is wrong."""
    paged.check_pool(op, pool, layout)
    wanted = (k.shape[0], layout.kv_heads, k.shape[2] if k.dim() == 4 else "S", layout.head_dim)
    for tensor, name in ((k, "k"), (v, "v")):
        if tuple(tensor.shape) != wanted or tensor.dtype != layout.dtype:
            fail(op, name, f"must be {wanted} of {layout.dtype}, got {tensor.dtype} {tuple(tensor.shape)}")
    if slots.dtype != torch.int64 or tuple(slots.shape) != (k.shape[0], k.shape[2]):
        fail(op, "slots", f"must be int64 {(k.shape[0], k.shape[2])}, got {slots.dtype} {tuple(slots.shape)}")


def layout_of(k: Tensor, block_tokens: int, format: str, group_size: int) -> BlockLayout:
    return BlockLayout(block_tokens, k.shape[1], k.shape[3], format, k.dtype, group_size)
