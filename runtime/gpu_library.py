"""Our operators on a GPU by plain torch operators, without a host synchronisation; Triton kernels will take over."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def product(
    x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, accumulate: bool
) -> None:
    """out [..., N] = x [..., K] @ matrix [K, N] + bias [N], or that added to out."""
    result = x @ matrix if bias is None else x @ matrix + bias
    if accumulate:
        out.add_(result)
    else:
        out.copy_(result)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor, scale: float, window: int, softcap: float,
    out: torch.Tensor,
) -> None:
    """`forebay::attention` into out [B, S, H, D], over the whole cache with a mask, as its length is not known here."""
    queries, groups = q.shape[2], q.shape[1] // k.shape[1]
    at = start[:, None, None] + torch.arange(queries, device=q.device)[None, :, None]
    position = torch.arange(k.shape[2], device=q.device)
    seen = (position <= at) & (position > at - window) if window else position <= at  # [B, S, L]
    if softcap:
        keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.tanh((q @ keys.mT).float() * (scale / softcap)) * softcap
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1).to(v.dtype)
        out.copy_((weights @ values).transpose(1, 2))
        return
    result = scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], scale=scale, enable_gqa=groups > 1)
    out.copy_(result.transpose(1, 2))


def kv_append(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor
) -> None:
    """`forebay::kv_append`: each sequence's chunk at its own position."""
    rows = torch.arange(k.shape[0], device=k.device)[:, None]
    position = start[:, None] + torch.arange(k.shape[2], device=k.device)
    k_cache.transpose(1, 2).index_put_((rows, position), k.transpose(1, 2))
    v_cache.transpose(1, 2).index_put_((rows, position), v.transpose(1, 2))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """`forebay::rms_norm` over the last dimension, in float32, rounded before the weight [H] is applied."""
    wide = x.float()
    torch.mul(weight, (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype), out=out)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    """`forebay::rotary`: x [B, H, S, R] * cos [B, S, R] + rotate_half(x) * sin."""
    lower, upper = x.chunk(2, -1)
    torch.add(x * cos.unsqueeze(1), torch.cat((-upper, lower), -1) * sin.unsqueeze(1), out=out)
