"""`forebay::kv_from_activation`: stored activations to K and V in blocks of a paged cache (HybridServe, section 3).

For tokens with hidden states x [T, H], as they are or in rows of `activation_append_q`: n = norm(x), k = n Wk^T + bk,
v = n Wv^T + bv, k turned by rotary embedding over the first cos.shape[1] of D, rounded to `dtype` and stored at `slots`
in the cache's format. Norms: "" none, "rms" x rsqrt(mean(x^2) + eps) w, "rms_plus_one" with 1 + w (Gemma), "layer" with
mean, weight and bias.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from forebay.kernels.cache.activation_append_q import reference as activation_append_q
from forebay.kernels.cache.kv_from_activation.reference import (
    TILE_TOKENS,
    Projection,
    States,
    check,
    fail,
    reference,
    rotate,
    unpack,
)
from forebay.kernels.formats import paged
from forebay.kernels.formats.paged import BlockLayout
from forebay.kernels.operator import Cost, Operator, Use, nbytes_of


@torch.library.custom_op("forebay::kv_from_activation", mutates_args=("pool",), device_types=("cpu", "cuda"))
def kv_from_activation(
    pool: Tensor,
    x: Tensor,
    slots: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    k_bias: Tensor | None,
    v_bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    features: int,
    x_bits: int,
    x_group: int,
    norm: str,
    eps: float,
    weight_format: str,
    kv_heads: int,
    head_dim: int,
    block_tokens: int,
    format: str,
    group_size: int,
    dtype: torch.dtype,
) -> None:
    """Write K and V of T tokens into pool uint8 [blocks, record], of the `paged.BlockLayout` that the last five make.

    x [T, H = features] of dtype (x_bits 0), or rows uint8 [T, R] that `activation_append_q` wrote with x_bits and
    x_group, read tile by tile and never held as values; slots int64 [T], below 0: left out; weights [Hkv, D, H] of
    dtype and any strides, or packed rows uint8 [Hkv, D, R] of weight_format with scales of dtype; norm vectors [H];
    biases [Hkv * D]; cos and sin [T, R]. ValueError names the argument that is wrong, before anything is written; on a
    GPU slots beyond the pool are left out too.
    """
    states = States(x, features, x_bits, x_group)
    by = Projection(k_weight, v_weight, weight_format, norm, eps, norm_weight, norm_bias, k_bias, v_bias, cos, sin)
    layout = BlockLayout(block_tokens, kv_heads, head_dim, format, dtype, group_size)
    (launch if pool.is_cuda else on_cpu)(pool, states, slots, by, layout)


def on_cpu(pool: Tensor, states: States, slots: Tensor, by: Projection, layout: BlockLayout) -> None:
    """The operator by torch, TILE_TOKENS at a time."""
    check(pool, states, slots, by, layout)
    if slots.numel() == 0:
        return
    if int(slots.max()) >= pool.shape[0] * layout.tokens:
        fail("slots", f"must be below {pool.shape[0] * layout.tokens}, got {int(slots.max())}")
    x, features, bits, group = states
    dtype, heads = layout.dtype, (layout.kv_heads, layout.head_dim)
    k_values, v_values = (unpack(w.flatten(0, 1), features, *by.weight_bits(), dtype, dtype)
                          for w in (by.k_weight, by.v_weight))  # fmt: skip
    for begin in range(0, slots.numel(), TILE_TOKENS):
        rows = slice(begin, begin + TILE_TOKENS)
        wide = unpack(x[rows], features, bits, group, torch.float32, activation_append_q.SCALE_DTYPE)
        n = by.normalised(wide).to(dtype)
        k, v = linear(n, k_values, by.k_bias), linear(n, v_values, by.v_bias)
        tables = (None if table is None else table[rows] for table in (by.cos, by.sin))
        turned = rotate(k.view(-1, *heads).float(), *tables).to(dtype)
        paged.write(pool, layout, slots[rows], turned, v.view(-1, *heads))


def launch(pool: Tensor, states: States, slots: Tensor, by: Projection, layout: BlockLayout) -> None:
    """The operator by its Triton kernel: for tensors on a GPU, or anywhere under TRITON_INTERPRET=1."""
    from forebay.kernels.cache.kv_from_activation import gpu

    check(pool, states, slots, by, layout)
    gpu.kv_from_activation(pool, states, slots, by, layout)


@kv_from_activation.register_fake
def _(*arguments: object) -> None:
    return None


def _cost(use: Use) -> Cost:
    """Two products for each token; the pool takes the K and V of each."""
    x, slots, k_weight, v_weight, *rest = use.args[1:11]
    features, (heads, width), (tokens, format, group) = use.args[11], use.args[17:19], use.args[19:22]
    layout = BlockLayout(tokens, heads, width, format, use.args[22], group)
    count = x.shape[0]
    return Cost(4 * count * features * heads * width, nbytes_of(x, slots, k_weight, v_weight, *rest),
                count * heads * layout.position_nbytes)  # fmt: skip


KV_FROM_ACTIVATION = Operator(torch.ops.forebay.kv_from_activation.default, reference, _cost)
