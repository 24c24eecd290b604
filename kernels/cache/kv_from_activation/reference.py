"""The definition of `forebay::kv_from_activation`, and the checks of its arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from forebay.kernels.cache.activation_append_q import reference as activation_append_q
from forebay.kernels.formats import packing, paged, row_sizes
from forebay.kernels.formats.paged import BlockLayout
from forebay.kernels.formats.table import NATIVE, WEIGHT_FORMATS
from forebay.kernels.quantization.quantize import operator as quantize

OP = "kv_from_activation"
TILE_TOKENS = 256  # of the CPU's steps: what is held in fp32 at once
NORMS = ("", "rms", "rms_plus_one", "layer")


class States(NamedTuple):
    """Hidden states of `features` values: x [T, H], or rows uint8 [T, R] that `activation_append_q` wrote with `bits`
    and `group`."""

    x: Tensor
    features: int
    bits: int = 0
    group: int = 0


class Projection(NamedTuple):
    """How K and V are made of hidden states; what each is, the operator says."""

    k_weight: Tensor
    v_weight: Tensor
    weight_format: str = "native"
    norm: str = ""
    eps: float = 0.0
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None

    def weight_bits(self) -> tuple[int, int]:
        """(bits, group size) of the weights; bits 0: native."""
        found = WEIGHT_FORMATS.get(self.weight_format, NATIVE)
        return found.bits, max(1, found.group_size)

    def normalised(self, x: Tensor) -> Tensor:
        """x [T, H] normalised in x's dtype."""
        if self.norm == "" or self.norm_weight is None:
            return x
        gain = self.norm_weight.to(x.dtype)
        if self.norm == "layer":
            x = x - x.mean(-1, keepdim=True)
        if self.norm == "rms_plus_one":
            gain = gain + 1.0
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * gain
        return y if self.norm_bias is None else y + self.norm_bias.to(x.dtype)


def unpack(rows: Tensor, features: int, bits: int, group: int, dtype: torch.dtype, scale_dtype: torch.dtype) -> Tensor:
    """Values [N, features] of dtype from packed rows uint8 [N, R], or from values (bits 0)."""
    if not bits:
        return rows.to(dtype)
    return quantize.dequantize(*packing.unpack_rows(rows, features, bits, group, scale_dtype), bits, group, 1, features,
                               dtype)  # fmt: skip


def rotate(k: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """k [T, Hkv, D] with its first cos.shape[1] values turned, halves as Llama does, in k's dtype."""
    if cos is None or sin is None:
        return k
    width = cos.shape[1]
    first, rest = k[..., :width], k[..., width:]
    turned = torch.cat((-first[..., width // 2 :], first[..., : width // 2]), -1)
    return torch.cat((first * cos.to(k.dtype)[:, None] + turned * sin.to(k.dtype)[:, None], rest), -1)


def reference(x: Tensor, by: Projection, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """(k, v) [T, Hkv, D] in dtype by the definition, on any device, from values: x [T, H], weights [Hkv, D, H]."""
    n = by.normalised(x.to(dtype))
    made = []
    for weight, bias in ((by.k_weight, by.k_bias), (by.v_weight, by.v_bias)):
        y = torch.einsum("th,gdh->tgd", n, weight.to(dtype))
        made.append(y if bias is None else y + bias.to(dtype).view(1, *weight.shape[:2]))
    return rotate(made[0], by.cos, by.sin), made[1]


def fail(argument: str, problem: str) -> None:
    raise ValueError(f"{OP}: {argument} {problem}")


def _check_vector(name: str, tensor: Tensor | None, size: int, layout: BlockLayout, device: torch.device) -> None:
    if tensor is None:
        return
    if tensor.dtype != layout.dtype or tuple(tensor.shape) != (size,) or tensor.device != device:
        fail(name, f"must be {layout.dtype} [{size}] on {device}, got {tensor.dtype} {tuple(tensor.shape)}")
    if size > 1 and tensor.stride(0) != 1:
        fail(name, f"must be contiguous, got strides {tensor.stride()}")


def _check_rows(name: str, tensor: Tensor, shape: tuple[int, ...], features: int, bits: int, group: int,
                layout: BlockLayout, device: torch.device) -> None:  # fmt: skip
    if bits:
        wanted = (*shape, row_sizes.row_nbytes(features, bits, group))
        if tensor.dtype != torch.uint8 or tuple(tensor.shape) != wanted or tensor.stride(-1) != 1:
            fail(name, f"must be uint8 {wanted} with contiguous rows, got {tensor.dtype} {tuple(tensor.shape)}")
        if any(stride % 2 for stride in tensor.stride()[:-1]) or tensor.storage_offset() % 2:
            fail(name, f"must have rows at even addresses, got strides {tensor.stride()}")
    elif tensor.dtype != layout.dtype or tuple(tensor.shape) != (*shape, features):
        fail(name, f"must be {layout.dtype} {(*shape, features)}, got {tensor.dtype} {tuple(tensor.shape)}")
    if tensor.device != device:
        fail(name, f"must be on {device}, got {tensor.device}")


def check(pool: Tensor, states: States, slots: Tensor, by: Projection, layout: BlockLayout) -> None:
    """ValueError names the argument whose dtype, shape, device or value is wrong."""
    x, features, x_bits, x_group = states
    _, _, weight_format, norm, _, norm_weight, norm_bias, k_bias, v_bias, cos, sin = by
    paged.check_pool(OP, pool, layout)
    if features < 1:
        fail("features", f"must be positive, got {features}")
    if slots.dtype != torch.int64 or slots.dim() != 1 or slots.device != pool.device or not slots.is_contiguous():
        fail("slots", f"must be int64 [T] on {pool.device}, contiguous, got {slots.dtype} {tuple(slots.shape)}")
    count, device = slots.numel(), pool.device
    if x_bits:
        activation_append_q.check_format(OP, x_bits, x_group, "x_")
    _check_rows("x", x, (count,), features, x_bits, x_group, layout, device)
    if features > 1 and x.stride(1) != 1:
        fail("x", f"must have contiguous rows, got strides {x.stride()}")
    if weight_format not in WEIGHT_FORMATS:
        fail("weight_format", f"must be one of {tuple(WEIGHT_FORMATS)}, got {weight_format!r}")
    for tensor, name in ((by.k_weight, "k_weight"), (by.v_weight, "v_weight")):
        shape = (layout.kv_heads, layout.head_dim)
        _check_rows(name, tensor, shape, features, *by.weight_bits(), layout, device)
    if norm not in NORMS:
        fail("norm", f"must be one of {NORMS}, got {norm!r}")
    if (norm != "") != (norm_weight is not None):
        fail("norm_weight", f"must be given exactly where there is a norm, which is {norm!r}")
    if (norm == "layer") != (norm_bias is not None):
        fail("norm_bias", f"must be given exactly for the norm 'layer', not for {norm!r}")
    for vector, name in ((norm_weight, "norm_weight"), (norm_bias, "norm_bias")):
        _check_vector(name, vector, features, layout, device)
    for vector, name in ((k_bias, "k_bias"), (v_bias, "v_bias")):
        _check_vector(name, vector, layout.kv_heads * layout.head_dim, layout, device)
    if (cos is None) != (sin is None):
        fail("sin", "and cos must be given together")
    for table, name in ((cos, "cos"), (sin, "sin")):
        if table is None:
            continue
        if table.dtype not in (layout.dtype, torch.float32) or table.dim() != 2 or table.device != device:
            fail(name, f"must be [{count}, R] of {layout.dtype} or fp32, got {table.dtype} {tuple(table.shape)}")
        if table.shape[0] != count or table.shape[1] % 2 or not 2 <= table.shape[1] <= layout.head_dim:
            fail(name, f"must be [{count}, R] with R even and at most {layout.head_dim}, got {tuple(table.shape)}")
        if table.stride(1) != 1 or (cos is not None and table.shape != cos.shape):
            fail(name, f"must have cos's shape and contiguous rows, got {tuple(table.shape)}")
