"""`forebay::kv_from_activation` in Triton: norm, two projections, bias, rotary and the cache's format, by one launch.

A program takes a tile of tokens and one KV head. It reads its tokens' activations for the norm's sums, then again (from
L2) for the projections, so that what is multiplied is normalised and rounded just as a norm of its own would. Programs
of all tokens stand side by side for one head: its rows of the weights cross from device memory once, and activations
stay in L2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels import packing
from forebay.kernels.gpu.arguments import AMD_STAGES, check_device, stages
from forebay.kernels.gpu.audit_case import AuditCase
from forebay.kernels.gpu.paged import dot, lane_values, paged_view, round_to
from forebay.kernels.gpu.rotary_append import quantize_heads
from forebay.kernels.paged import BlockLayout

NORMS = {"": 0, "rms": 1, "rms_plus_one": 2, "layer": 3}


class Tile(NamedTuple):
    """Tokens and features of a tile, warps and pipeline stages."""

    tokens: int
    features: int
    num_warps: int
    num_stages: int


# By tokens there are; accumulators of K and V at D = 128 take 64 registers of each thread in the largest.
TILES = {"few": Tile(16, 64, 4, 3), "many": Tile(64, 64, 8, 3), "wide": Tile(32, 64, 8, 2)}


@triton.jit
def load_activation(
    ptr, scale_ptr, low_ptr, token, present, k0, features, stride, stride_scale,
    BITS: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Features k0 .. k0 + BK - 1 of tokens in fp32; 0 where there is none."""
    mask = present[:, None] & (k0 + tl.arange(0, BK) < features)[None, :]
    if BITS == 0:
        k = k0 + tl.arange(0, BK)
        x = tl.load(ptr + (token * stride)[:, None] + k[None, :], mask=mask, other=0.0).to(tl.float32)
    else:
        # Rows are whole groups: beyond the features codes are there.
        byte = k0 * BITS // 8 + tl.arange(0, BK * BITS // 8)
        code = tl.load(ptr + (token * stride)[:, None] + byte[None, :], mask=present[:, None], other=0)
        if BITS == 4:
            code = tl.interleave(code & 15, code >> 4)
        at = token * stride_scale + k0 // GROUP
        scale = tl.load(scale_ptr + at, mask=present, other=0.0).to(tl.float32)
        low = tl.load(low_ptr + at, mask=present, other=0.0).to(tl.float32)
        x = tl.where(mask, code.to(tl.float32) * scale[:, None] + low[:, None], 0.0)
    return x


@triton.jit
def load_weight(
    ptr, scale_ptr, low_ptr, d, valid, k0, features, stride_n, stride_k, stride_scale, dtype: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Rows d of one head's weight, features k0 .. k0 + BK - 1, as [DP, BK] of dtype."""
    if BITS == 0:
        k = k0 + tl.arange(0, BK)
        at = d.to(tl.int64)[:, None] * stride_n + k.to(tl.int64)[None, :] * stride_k
        w = tl.load(ptr + at, mask=valid[:, None] & (k < features)[None, :], other=0.0)
    else:
        # Rows are whole groups: beyond the features codes are there, and meet zeros.
        byte = k0 * BITS // 8 + tl.arange(0, BK * BITS // 8)
        code = tl.load(ptr + d.to(tl.int64)[:, None] * stride_n + byte[None, :], mask=valid[:, None], other=0)
        if BITS == 4:
            code = tl.interleave(code & 15, code >> 4)
        at = d.to(tl.int64) * stride_scale + k0 // GROUP
        scale = tl.load(scale_ptr + at, mask=valid, other=0.0).to(tl.float32)
        low = tl.load(low_ptr + at, mask=valid, other=0.0).to(tl.float32)
        w = round_to(code.to(tl.float32) * scale[:, None] + low[:, None], dtype)
    return w


@triton.jit
def store_rows(
    x, ptr, pairs_ptr, block, inside, used, stride_block, stride_row, stride_pairs, dtype: tl.constexpr,
    TOKENS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Lanes [TOKENS, DP] of dtype to rows `inside` of blocks `block`, as they are or quantised."""
    row = block * stride_block + inside * stride_row
    if BITS == 0:
        d, valid = lane_values(D, DP, G, GP)
        tl.store(ptr + row[:, None] + d[None, :], x, mask=used[:, None] & valid[None, :])
    else:
        GROUPS: tl.constexpr = (D + G - 1) // G
        PER_BYTE: tl.constexpr = 8 // BITS
        codes, word = quantize_heads(x.to(tl.float32), dtype, TOKENS, D, DP, G, GP, BITS)
        at, valid = lane_values(GROUPS * G // PER_BYTE, DP // PER_BYTE, G // PER_BYTE, GP // PER_BYTE)
        tl.store(ptr + row[:, None] + at[None, :], codes, mask=used[:, None] & valid[None, :])
        group = tl.arange(0, DP // GP)
        pair = block * stride_pairs + inside * GROUPS
        tl.store(pairs_ptr + pair[:, None] + group[None, :], word, mask=used[:, None] & (group < GROUPS)[None, :])


@triton.jit
def kv_from_activation_kernel(
    x_ptr, x_scale_ptr, x_low_ptr, slots_ptr,
    k_weight_ptr, k_scale_ptr, k_low_ptr, v_weight_ptr, v_scale_ptr, v_low_ptr,
    norm_weight_ptr, norm_bias_ptr, k_bias_ptr, v_bias_ptr, cos_ptr, sin_ptr,
    k_ptr, v_ptr, k_pairs_ptr, v_pairs_ptr,
    tokens, features, slot_count, eps, xs, xss, kwh, kwn, kwk, ksh, ksn, vwh, vwn, vwk, vsh, vsn, cs, ss,
    kb, kh, kr, vb, vh, vr, pb, ph,
    NORM: tl.constexpr, X_BITS: tl.constexpr, X_GROUP: tl.constexpr, W_BITS: tl.constexpr, W_GROUP: tl.constexpr,
    ROTARY: tl.constexpr, TOKENS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, dtype: tl.constexpr,
    BITS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Program (tile of tokens, KV head)."""
    token = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    present = token < tokens
    head = tl.program_id(1).to(tl.int64)
    d, valid = lane_values(D, DP, G, GP)

    mean = tl.zeros((BM,), tl.float32)
    power = tl.zeros((BM,), tl.float32)
    if NORM == 3:
        for k0 in range(0, features, BK):
            x = load_activation(
                x_ptr, x_scale_ptr, x_low_ptr, token, present, k0, features, xs, xss, X_BITS, X_GROUP, BK
            )
            mean += tl.sum(x, 1)
        mean = mean / features
    if NORM != 0:
        for k0 in range(0, features, BK):
            x = load_activation(
                x_ptr, x_scale_ptr, x_low_ptr, token, present, k0, features, xs, xss, X_BITS, X_GROUP, BK
            )
            x = tl.where((k0 + tl.arange(0, BK) < features)[None, :], x - mean[:, None], 0.0)
            power += tl.sum(x * x, 1)
    factor = tl.rsqrt(power / features + eps)

    k_weight_ptr += head * kwh
    v_weight_ptr += head * vwh
    if W_BITS != 0:
        k_scale_ptr += head * ksh
        k_low_ptr += head * ksh
        v_scale_ptr += head * vsh
        v_low_ptr += head * vsh
    k_acc = tl.zeros((BM, DP), tl.float32)
    v_acc = tl.zeros((BM, DP), tl.float32)
    for k0 in range(0, features, BK):
        x = load_activation(x_ptr, x_scale_ptr, x_low_ptr, token, present, k0, features, xs, xss, X_BITS, X_GROUP, BK)
        if NORM != 0:
            k = k0 + tl.arange(0, BK)
            gain = tl.load(norm_weight_ptr + k, mask=k < features, other=0.0).to(tl.float32)
            if NORM == 2:
                gain += 1.0
            x = (x - mean[:, None]) * factor[:, None] * gain[None, :]
            if NORM == 3:
                x += tl.load(norm_bias_ptr + k, mask=k < features, other=0.0).to(tl.float32)[None, :]
            x = tl.where((k < features)[None, :], x, 0.0)
        x = round_to(x, dtype)
        w = load_weight(
            k_weight_ptr, k_scale_ptr, k_low_ptr, d, valid, k0, features, kwn, kwk, ksn, dtype, W_BITS, W_GROUP, BK
        )
        k_acc = dot(x, tl.trans(w), k_acc)
        w = load_weight(
            v_weight_ptr, v_scale_ptr, v_low_ptr, d, valid, k0, features, vwn, vwk, vsn, dtype, W_BITS, W_GROUP, BK
        )
        v_acc = dot(x, tl.trans(w), v_acc)
    if k_bias_ptr is not None:
        k_acc += tl.load(k_bias_ptr + head * D + d, mask=valid, other=0.0).to(tl.float32)[None, :]
    if v_bias_ptr is not None:
        v_acc += tl.load(v_bias_ptr + head * D + d, mask=valid, other=0.0).to(tl.float32)[None, :]

    if ROTARY != 0:
        k_acc = round_to(k_acc, dtype).to(tl.float32)
        turned = d < ROTARY
        other = tl.where(turned, tl.where(d < ROTARY // 2, d + ROTARY // 2, d - ROTARY // 2), d)
        lane = other // G * GP + other % G
        lane = tl.where(valid, lane, 0)
        partner = tl.gather(k_acc, lane[None, :] + tl.zeros((BM, DP), tl.int32), 1)
        mask = present[:, None] & (turned & valid)[None, :]
        cos = tl.load(cos_ptr + (token * cs)[:, None] + d[None, :], mask=mask, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + (token * ss)[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        k_acc = k_acc * cos + partner * tl.where(d < ROTARY // 2, -1.0, 1.0)[None, :] * sin

    slot = tl.load(slots_ptr + token, mask=present, other=-1)
    used = (slot >= 0) & (slot < slot_count)
    block = slot // TOKENS
    inside = slot % TOKENS
    k_pairs = k_pairs_ptr
    v_pairs = v_pairs_ptr
    if BITS != 0:
        k_pairs += head * ph
        v_pairs += head * ph
    k_out = round_to(k_acc, dtype)
    v_out = round_to(v_acc, dtype)
    store_rows(k_out, k_ptr + head * kh, k_pairs, block, inside, used, kb, kr, pb, dtype, BM, D, DP, G, GP, BITS)
    store_rows(v_out, v_ptr + head * vh, v_pairs, block, inside, used, vb, vr, pb, dtype, BM, D, DP, G, GP, BITS)


@dataclass(frozen=True)
class Matrix:
    """Values of a matrix or of a stack of them, or their packed codes with scale and low; strides in elements."""

    data: Tensor
    scale: Tensor | None = None
    low: Tensor | None = None
    bits: int = 0
    group: int = 1


def unpack(rows: Tensor, features: int, bits: int, group: int, scale_dtype: torch.dtype) -> Matrix:
    """The parts of packed rows uint8 [..., R]; bits 0: rows are the values."""
    if not bits:
        return Matrix(rows)
    return Matrix(*packing.unpack_rows(rows, features, bits, group, scale_dtype), bits, group)


TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def tile(tokens: int, lanes: int, *groups: int) -> Tile:
    """The tile for so many tokens; its features divide the groups of what is quantised (0: it is not)."""
    chosen = TILES["few" if tokens <= 16 else "many" if lanes <= 128 else "wide"]
    return chosen._replace(features=min([chosen.features, *filter(None, groups)]))


def kv_from_activation(
    pool: Tensor, x: Matrix, slots: Tensor, k_weight: Matrix, v_weight: Matrix, norm_weight: Tensor | None,
    norm_bias: Tensor | None, k_bias: Tensor | None, v_bias: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    features: int, norm: str, eps: float, layout: BlockLayout,
) -> None:  # fmt: skip
    """Fill slots int64 [T] of the pool from x [T, H] and weights [Hkv, D, H]; arguments checked as the operator does.

    A slot below 0 or beyond the pool is left out.
    """
    check_device("kv_from_activation", "pool", pool)
    if slots.numel() == 0:
        return
    view = paged_view(pool, layout)
    chosen = tile(slots.numel(), view.constants["DP"], *(m.group if m.bits else 0 for m in (x, k_weight)))
    weights = [part for w in (k_weight, v_weight) for part in (w.data, w.scale, w.low)]
    strides: list[int] = []
    for w in (k_weight, v_weight):
        strides += w.data.stride()
        strides += w.scale.stride()[:2] if w.scale is not None else (0, 0)
    tables = [t.stride(0) if t is not None else 0 for t in (cos, sin)]
    kv_from_activation_kernel[(triton.cdiv(slots.numel(), chosen.tokens), layout.kv_heads)](
        x.data, x.scale, x.low, slots, *weights, norm_weight, norm_bias, k_bias, v_bias, cos, sin, *view.pointers,
        slots.numel(), features, pool.shape[0] * layout.tokens, eps,
        x.data.stride(0), x.scale.stride(0) if x.scale is not None else 0, *strides, *tables, *view.strides,
        NORM=NORMS[norm], X_BITS=x.bits, X_GROUP=x.group, W_BITS=k_weight.bits, W_GROUP=k_weight.group,
        ROTARY=cos.shape[1] if cos is not None else 0, BM=chosen.tokens, BK=chosen.features,
        dtype=TRITON_DTYPES[layout.dtype], **view.constants,
        num_warps=chosen.num_warps, num_stages=stages(chosen.num_stages),
    )  # fmt: skip


def _case(
    name: str, dtype: str, tokens: int, features: int, kv_heads: int, dim: int, norm: str, rotary: bool,
    format: str = "native", weights: str = "native", activation: str = "native",
) -> AuditCase:  # fmt: skip
    torch_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    layout = BlockLayout(64, kv_heads, dim, format, torch_dtype)
    view = paged_view(torch.empty(1, layout.record_nbytes, dtype=torch.uint8), layout)
    w_bits, w_group = packing.WEIGHT_FORMATS.get(weights, (0, 1))
    x_bits, x_group = packing.ACTIVATION_FORMATS.get(activation, (0, 1))
    chosen = tile(tokens, view.constants["DP"], x_group if x_bits else 0, w_group if w_bits else 0)
    bias = norm == "layer"
    present = {
        "x_ptr": True, "x_scale_ptr": bool(x_bits), "x_low_ptr": bool(x_bits), "slots_ptr": True,
        "k_weight_ptr": True, "k_scale_ptr": bool(w_bits), "k_low_ptr": bool(w_bits),
        "v_weight_ptr": True, "v_scale_ptr": bool(w_bits), "v_low_ptr": bool(w_bits),
        "norm_weight_ptr": bool(norm), "norm_bias_ptr": bias, "k_bias_ptr": bias, "v_bias_ptr": bias,
        "cos_ptr": rotary, "sin_ptr": rotary, "k_ptr": True, "v_ptr": True,
        "k_pairs_ptr": bool(layout.bits), "v_pairs_ptr": bool(layout.bits),
    }  # fmt: skip
    kinds = dict.fromkeys(present, f"*{dtype}") | {"slots_ptr": "*i64", "k_pairs_ptr": "*i32", "v_pairs_ptr": "*i32"}
    kinds |= dict.fromkeys(("x_scale_ptr", "x_low_ptr"), "*fp16")
    stored = {"x_ptr": x_bits} | dict.fromkeys(("k_weight_ptr", "v_weight_ptr"), w_bits)
    stored |= dict.fromkeys(("k_ptr", "v_ptr"), layout.bits)
    kinds |= {n: "*u8" for n, quantised in stored.items() if quantised}
    signature = {n: kinds[n] if there else "constexpr" for n, there in present.items()}
    strides = (
        "xs", "xss", "kwh", "kwn", "kwk", "ksh", "ksn", "vwh", "vwn", "vwk", "vsh", "vsn", "cs", "ss",
        "kb", "kh", "kr", "vb", "vh", "vr", "pb", "ph",
    )  # fmt: skip
    signature |= dict.fromkeys(("tokens", "features", "slot_count"), "i32") | {"eps": "fp32"}
    signature |= dict.fromkeys(strides, "i32")
    constants: dict[str, Any] = {n: None for n, there in present.items() if not there}
    ones = ("kwk", "vwk")  # a launch makes a stride of 1 a constant
    signature |= dict.fromkeys(ones, "constexpr")
    constants |= dict.fromkeys(ones, 1)
    constants |= {
        "NORM": NORMS[norm], "X_BITS": x_bits, "X_GROUP": x_group, "W_BITS": w_bits,
        "W_GROUP": w_group, "ROTARY": dim if rotary else 0, "BM": chosen.tokens, "BK": chosen.features,
        "dtype": TRITON_DTYPES[torch_dtype],
    }  # fmt: skip
    row = packing.row_nbytes(features, w_bits, w_group) if w_bits else 2 * features
    x_row = packing.row_nbytes(features, x_bits, x_group) if x_bits else 2 * features
    # 1024 activations and one head's weights stay in L2 while its programs run: counted is what crosses from memory.
    nbytes = 2 * kv_heads * dim * row + tokens * (x_row + 8 + kv_heads * layout.position_nbytes)
    loose = ("ksh", "ksn", "vsh", "vsn", "xss", "x_scale_ptr", "x_low_ptr", *ones)
    pointers = (n for n, kind in signature.items() if kind.startswith("*"))
    return AuditCase(
        name=f"kv_from_activation/{name}/{tokens}x{features}x{kv_heads}x{dim}-{dtype}",
        fn=kv_from_activation_kernel,
        signature=signature,
        constants=constants | view.constants,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        amd_stages=min(chosen.num_stages, AMD_STAGES),
        divisible=tuple(n for n in (*pointers, *strides, "features") if n not in loose),
        uses_dot=True,
        main_operands=3,
        bytes_moved=nbytes,
        minimum_bytes=nbytes,
    )


def audit_cases() -> list[AuditCase]:
    """OPT-30B (layer norm, biases) and Llama-2-7B (RMS norm, rotary), from 16 and from 1024 tokens."""
    return [
        _case("opt", "fp16", 1024, 7168, 56, 128, "layer", False),
        _case("llama", "bf16", 1024, 4096, 32, 128, "rms", True),
        _case("llama-few", "bf16", 16, 4096, 32, 128, "rms", True),
        _case("llama-kv8", "bf16", 1024, 4096, 32, 128, "rms", True, format="kv8"),
        _case("opt-act8-kv4", "fp16", 1024, 7168, 56, 128, "layer", False, format="kv4", activation="act8"),
        _case("llama-w4", "bf16", 1024, 4096, 32, 128, "rms", True, weights="w4g64"),
        _case("opt-w4-act8", "fp16", 1024, 7168, 56, 128, "layer", False, weights="w4g128", activation="act8"),
        _case("llama-act8", "bf16", 1024, 4096, 32, 128, "rms", True, activation="act8"),
    ]
