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

from forebay.kernels import activation_append_q, packing, paged, quantize
from forebay.kernels.paged import BlockLayout

OP = "kv_from_activation"
TILE_TOKENS = 256  # of the CPU's steps: what is held in fp32 at once
NORMS = ("", "rms", "rms_plus_one", "layer")


def weight_bits(format: str) -> tuple[int, int]:
    """(bits, group size) of a weight format; bits 0: native."""
    return packing.WEIGHT_FORMATS.get(format, (0, 1))


def unpack(rows: Tensor, features: int, bits: int, group: int, dtype: torch.dtype, scale_dtype: torch.dtype) -> Tensor:
    """Values [N, features] of dtype from packed rows uint8 [N, R], or from values (bits 0)."""
    if not bits:
        return rows.to(dtype)
    return quantize.dequantize(*packing.unpack_rows(rows, features, bits, group, scale_dtype), bits, group, 1, features,
                               dtype)  # fmt: skip


def normalise(x: Tensor, norm: str, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x [T, H] normalised in x's dtype."""
    if norm == "" or weight is None:
        return x
    gain = weight.to(x.dtype)
    if norm == "layer":
        x = x - x.mean(-1, keepdim=True)
    if norm == "rms_plus_one":
        gain = gain + 1.0
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain
    return y if bias is None else y + bias.to(x.dtype)


def rotate(k: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """k [T, Hkv, D] with its first cos.shape[1] values turned, halves as Llama does, in k's dtype."""
    if cos is None or sin is None:
        return k
    width = cos.shape[1]
    first, rest = k[..., :width], k[..., width:]
    turned = torch.cat((-first[..., width // 2 :], first[..., : width // 2]), -1)
    return torch.cat((first * cos.to(k.dtype)[:, None] + turned * sin.to(k.dtype)[:, None], rest), -1)


def reference(
    x: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    norm: str = "",
    eps: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """(k, v) [T, Hkv, D] in dtype by the definition, on any device, from values: x [T, H], weights [Hkv, D, H]."""
    n = normalise(x.to(dtype), norm, norm_weight, norm_bias, eps)
    made = []
    for weight, bias in ((k_weight, k_bias), (v_weight, v_bias)):
        y = torch.einsum("th,gdh->tgd", n, weight.to(dtype))
        made.append(y if bias is None else y + bias.to(dtype).view(1, *weight.shape[:2]))
    return rotate(made[0], cos, sin), made[1]


def _fail(argument: str, problem: str) -> None:
    raise ValueError(f"{OP}: {argument} {problem}")


def _check_vector(name: str, tensor: Tensor | None, size: int, layout: BlockLayout, device: torch.device) -> None:
    if tensor is None:
        return
    if tensor.dtype != layout.dtype or tuple(tensor.shape) != (size,) or tensor.device != device:
        _fail(name, f"must be {layout.dtype} [{size}] on {device}, got {tensor.dtype} {tuple(tensor.shape)}")
    if size > 1 and tensor.stride(0) != 1:
        _fail(name, f"must be contiguous, got strides {tensor.stride()}")


def _check_rows(name: str, tensor: Tensor, shape: tuple[int, ...], features: int, bits: int, group: int,
                layout: BlockLayout, device: torch.device) -> None:  # fmt: skip
    if bits:
        wanted = (*shape, packing.row_nbytes(features, bits, group))
        if tensor.dtype != torch.uint8 or tuple(tensor.shape) != wanted or tensor.stride(-1) != 1:
            _fail(name, f"must be uint8 {wanted} with contiguous rows, got {tensor.dtype} {tuple(tensor.shape)}")
        if any(stride % 2 for stride in tensor.stride()[:-1]) or tensor.storage_offset() % 2:
            _fail(name, f"must have rows at even addresses, got strides {tensor.stride()}")
    elif tensor.dtype != layout.dtype or tuple(tensor.shape) != (*shape, features):
        _fail(name, f"must be {layout.dtype} {(*shape, features)}, got {tensor.dtype} {tuple(tensor.shape)}")
    if tensor.device != device:
        _fail(name, f"must be on {device}, got {tensor.device}")


def check(
    pool: Tensor, x: Tensor, slots: Tensor, k_weight: Tensor, v_weight: Tensor, norm_weight: Tensor | None,
    norm_bias: Tensor | None, k_bias: Tensor | None, v_bias: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    features: int, x_bits: int, x_group: int, norm: str, weight_format: str, layout: BlockLayout,
) -> None:  # fmt: skip
    """ValueError names the argument whose dtype, shape, device or value is wrong."""
    paged.check_pool(OP, pool, layout)
    if features < 1:
        _fail("features", f"must be positive, got {features}")
    if slots.dtype != torch.int64 or slots.dim() != 1 or slots.device != pool.device or not slots.is_contiguous():
        _fail("slots", f"must be int64 [T] on {pool.device}, contiguous, got {slots.dtype} {tuple(slots.shape)}")
    count, device = slots.numel(), pool.device
    if x_bits:
        activation_append_q.check_format(OP, x_bits, x_group, "x_")
    _check_rows("x", x, (count,), features, x_bits, x_group, layout, device)
    if features > 1 and x.stride(1) != 1:
        _fail("x", f"must have contiguous rows, got strides {x.stride()}")
    if weight_format != "native" and weight_format not in packing.WEIGHT_FORMATS:
        _fail("weight_format", f"must be native or one of {tuple(packing.WEIGHT_FORMATS)}, got {weight_format!r}")
    for tensor, name in ((k_weight, "k_weight"), (v_weight, "v_weight")):
        shape = (layout.kv_heads, layout.head_dim)
        _check_rows(name, tensor, shape, features, *weight_bits(weight_format), layout, device)
    if norm not in NORMS:
        _fail("norm", f"must be one of {NORMS}, got {norm!r}")
    if (norm != "") != (norm_weight is not None):
        _fail("norm_weight", f"must be given exactly where there is a norm, which is {norm!r}")
    if (norm == "layer") != (norm_bias is not None):
        _fail("norm_bias", f"must be given exactly for the norm 'layer', not for {norm!r}")
    for vector, name in ((norm_weight, "norm_weight"), (norm_bias, "norm_bias")):
        _check_vector(name, vector, features, layout, device)
    for vector, name in ((k_bias, "k_bias"), (v_bias, "v_bias")):
        _check_vector(name, vector, layout.kv_heads * layout.head_dim, layout, device)
    if (cos is None) != (sin is None):
        _fail("sin", "and cos must be given together")
    for table, name in ((cos, "cos"), (sin, "sin")):
        if table is None:
            continue
        if table.dtype not in (layout.dtype, torch.float32) or table.dim() != 2 or table.device != device:
            _fail(name, f"must be [{count}, R] of {layout.dtype} or fp32, got {table.dtype} {tuple(table.shape)}")
        if table.shape[0] != count or table.shape[1] % 2 or not 2 <= table.shape[1] <= layout.head_dim:
            _fail(name, f"must be [{count}, R] with R even and at most {layout.head_dim}, got {tuple(table.shape)}")
        if table.stride(1) != 1 or (cos is not None and table.shape != cos.shape):
            _fail(name, f"must have cos's shape and contiguous rows, got {tuple(table.shape)}")


@torch.library.custom_op("forebay::kv_from_activation", mutates_args=("pool",), device_types="cpu")
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
    layout = BlockLayout(block_tokens, kv_heads, head_dim, format, dtype, group_size)
    check(pool, x, slots, k_weight, v_weight, norm_weight, norm_bias, k_bias, v_bias, cos, sin, features, x_bits,
          x_group, norm, weight_format, layout)  # fmt: skip
    if slots.numel() == 0:
        return
    if int(slots.max()) >= pool.shape[0] * block_tokens:
        _fail("slots", f"must be below {pool.shape[0] * block_tokens}, got {int(slots.max())}")
    packed = weight_bits(weight_format)
    k_values, v_values = (unpack(w.flatten(0, 1), features, *packed, dtype, dtype) for w in (k_weight, v_weight))
    for begin in range(0, slots.numel(), TILE_TOKENS):
        rows = slice(begin, begin + TILE_TOKENS)
        wide = unpack(x[rows], features, x_bits, x_group, torch.float32, activation_append_q.SCALE_DTYPE)
        n = normalise(wide, norm, norm_weight, norm_bias, eps).to(dtype)
        k, v = linear(n, k_values, k_bias), linear(n, v_values, v_bias)
        tables = (None if table is None else table[rows] for table in (cos, sin))
        turned = rotate(k.view(-1, kv_heads, head_dim).float(), *tables).to(dtype)
        paged.write(pool, layout, slots[rows], turned, v.view(-1, kv_heads, head_dim))


@kv_from_activation.register_kernel("cuda")
def _(
    pool: Tensor, x: Tensor, slots: Tensor, k_weight: Tensor, v_weight: Tensor, norm_weight: Tensor | None,
    norm_bias: Tensor | None, k_bias: Tensor | None, v_bias: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    features: int, x_bits: int, x_group: int, norm: str, eps: float, weight_format: str, kv_heads: int, head_dim: int,
    block_tokens: int, format: str, group_size: int, dtype: torch.dtype,
) -> None:  # fmt: skip
    launch(pool, x, slots, k_weight, v_weight, norm_weight, norm_bias, k_bias, v_bias, cos, sin, features, x_bits,
           x_group, norm, eps, weight_format,
           BlockLayout(block_tokens, kv_heads, head_dim, format, dtype, group_size))  # fmt: skip


def launch(
    pool: Tensor, x: Tensor, slots: Tensor, k_weight: Tensor, v_weight: Tensor, norm_weight: Tensor | None,
    norm_bias: Tensor | None, k_bias: Tensor | None, v_bias: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    features: int, x_bits: int, x_group: int, norm: str, eps: float, weight_format: str, layout: BlockLayout,
) -> None:  # fmt: skip
    """The operator by its Triton kernel: for tensors on a GPU, or anywhere under TRITON_INTERPRET=1."""
    from forebay.kernels.gpu import kv_from_activation as gpu

    check(pool, x, slots, k_weight, v_weight, norm_weight, norm_bias, k_bias, v_bias, cos, sin, features, x_bits,
          x_group, norm, weight_format, layout)  # fmt: skip
    k_made, v_made = (gpu.Matrix(w, *weight_bits(weight_format)) for w in (k_weight, v_weight))
    gpu.kv_from_activation(pool, gpu.Matrix(x, x_bits, x_group), slots, k_made, v_made, norm_weight, norm_bias, k_bias,
                           v_bias, cos, sin, features, norm, eps, layout)  # fmt: skip


@kv_from_activation.register_fake
def _(
    pool: Tensor, x: Tensor, slots: Tensor, k_weight: Tensor, v_weight: Tensor, norm_weight: Tensor | None,
    norm_bias: Tensor | None, k_bias: Tensor | None, v_bias: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    features: int, x_bits: int, x_group: int, norm: str, eps: float, weight_format: str, kv_heads: int, head_dim: int,
    block_tokens: int, format: str, group_size: int, dtype: torch.dtype,
) -> None:  # fmt: skip
    return None
