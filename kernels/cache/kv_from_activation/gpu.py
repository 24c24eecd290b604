"""`forebay::kv_from_activation` in Triton: norm, two projections, bias, rotary and the cache's format, by one launch.

A program takes a tile of tokens and one KV head. It reads its tokens' activations for the norm's sums, then again (from
L2) for the projections, so that what is multiplied is normalised and rounded just as a norm of its own would. Programs
of all tokens stand side by side for one head: its rows of the weights cross from device memory once, and activations
stay in L2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.cache.kv_from_activation.reference import Projection, States
from forebay.kernels.cache.rotary_append.gpu import quantize_heads
from forebay.kernels.formats import row_sizes
from forebay.kernels.formats.paged import BlockLayout
from forebay.kernels.formats.table import ACTIVATION_FORMATS, NATIVE, WEIGHT_FORMATS
from forebay.kernels.gpu_support.arguments import AMD_STAGES, check_device, fail, stages
from forebay.kernels.gpu_support.audit_case import AuditCase
from forebay.kernels.gpu_support.packed_tiles import add_packed, load_activation
from forebay.kernels.gpu_support.paged import dot, lane_values, paged_view, round_to
from forebay.kernels.products.linear_q.gpu import columns_of

NORMS = {"": 0, "rms": 1, "rms_plus_one": 2, "layer": 3}


class KVTile(NamedTuple):
    """Tokens and features of a tile, warps and pipeline stages."""

    tokens: int
    features: int
    num_warps: int
    num_stages: int


# By tokens there are; accumulators of K and V at D = 128 take 64 registers of each thread in the largest.
TILES = {"few": KVTile(16, 64, 4, 3), "many": KVTile(64, 64, 8, 3), "wide": KVTile(32, 64, 8, 2)}
# Of packed weights, which are half or a quarter of the bytes.
PACKED_TILES = {"few": KVTile(16, 128, 4, 3), "many": KVTile(64, 128, 8, 3), "wide": KVTile(32, 64, 8, 3)}
# Bytes that packed rows lie apart a multiple of.
UNIT = row_sizes.WEIGHT_ALIGN


@triton.jit
def load_weight(at, k, left, WHOLE: tl.constexpr):
    """[DP, BK] at pointers `at`; 0 at columns k [BK] from `left` on."""
    return tl.load(at) if WHOLE else tl.load(at, mask=(k < left)[None, :], other=0.0)


@triton.jit
def norm_of(
    rows, below, features, eps, NORM: tl.constexpr, X_BITS: tl.constexpr, X_GROUP: tl.constexpr,
    BK: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """(mean [BM], which is 0 but for the layer norm, 1 / deviation) of activations as load_activation takes them.

    Both sums come in one pass, about the mean of the first BK features. It is off the mean of all by at most
    sqrt(features / BK) deviations, so the difference of the squares keeps all but log2(features / BK) bits.
    """
    mean = tl.zeros((below.shape[0],), tl.float32)
    power = mean
    if NORM == 3:
        opening = load_activation(rows, below, 0, features, X_BITS, X_GROUP, BK, WHOLE)
        mean = tl.sum(opening, 1) / tl.minimum(features, BK)
    if NORM != 0:
        total = tl.zeros((below.shape[0], BK), tl.float32)
        square = tl.zeros((below.shape[0], BK), tl.float32)
        # Tiles are as wide as in the product's loop: a wider one's layout would be that loop's too, on part of it.
        for begin in tl.range(0, features, TILES * BK, num_stages=STAGES):
            for tile in tl.static_range(TILES):
                k0 = begin + tile * BK
                x = load_activation(rows, below, k0, features, X_BITS, X_GROUP, BK, WHOLE)
                if NORM == 3:
                    x -= mean[:, None]
                    if not WHOLE:
                        x = tl.where((tl.arange(0, BK) < features - k0)[None, :], x, 0.0)
                    total += x
                square += x * x
        power = tl.sum(square, 1) / features
        if NORM == 3:
            off = tl.sum(total, 1) / features
            power -= off * off
            mean += off
    return mean, tl.rsqrt(power + eps)


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
    x_ptr, slots_ptr, k_weight_ptr, v_weight_ptr,
    norm_weight_ptr, norm_bias_ptr, k_bias_ptr, v_bias_ptr, cos_ptr, sin_ptr,
    k_ptr, v_ptr, k_pairs_ptr, v_pairs_ptr,
    tokens, features, slot_count, eps, xs, kwh, kwn, kwk, vwh, vwn, vwk, cs, ss, kb, kh, kr, vb, vh, vr, pb, ph,
    NORM: tl.constexpr, X_BITS: tl.constexpr, X_GROUP: tl.constexpr, W_BITS: tl.constexpr, W_GROUP: tl.constexpr,
    ROTARY: tl.constexpr, TOKENS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr,
    WHOLE: tl.constexpr, PTX: tl.constexpr, STAGES: tl.constexpr, dtype: tl.constexpr,
    BITS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Program (tile of tokens, KV head). Packed rows come as 32-bit words, their strides in units of 16 bytes.

    WHOLE: features are a multiple of BK, and of the TILES that a turn of the norm's sums takes.
    """
    token = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    present = token < tokens
    head = tl.program_id(1).to(tl.int64)
    d, valid = lane_values(D, DP, G, GP)
    at = tl.arange(0, BK)

    # What is the same for the whole tile stays a scalar, and what is not fits in 32 bits.
    first = tl.program_id(0) * BM
    X_UNIT: tl.constexpr = 4 if X_BITS else 1
    rows = x_ptr + first.to(tl.int64) * (xs * X_UNIT)
    below = tl.minimum(tl.arange(0, BM), tokens - 1 - first)[:, None] * (xs * X_UNIT)

    mean, factor = norm_of(rows, below, features, eps, NORM, X_BITS, X_GROUP, BK, TILES, WHOLE, STAGES)

    W_UNIT: tl.constexpr = 4 if W_BITS else 1
    stored = tl.minimum(d, D - 1)[:, None]
    k_weight_ptr += head * kwh * W_UNIT
    v_weight_ptr += head * vwh * W_UNIT
    k_below = stored * (kwn * W_UNIT)
    v_below = stored * (vwn * W_UNIT)
    if W_BITS == 0:
        k_below += at[None, :] * kwk
        v_below += at[None, :] * vwk
    k_acc = tl.zeros((DP, BM) if W_BITS else (BM, DP), tl.float32)
    v_acc = tl.zeros((DP, BM) if W_BITS else (BM, DP), tl.float32)
    for k0 in tl.range(0, features, BK, num_stages=STAGES):
        left = features - k0
        x = load_activation(rows, below, k0, features, X_BITS, X_GROUP, BK, WHOLE)
        if NORM != 0:
            # Behind the features x is 0 or, about the mean, meets a gain of 0.
            if WHOLE:
                gain = tl.load(norm_weight_ptr + k0 + at).to(tl.float32)
            else:
                gain = tl.load(norm_weight_ptr + k0 + at, mask=at < left, other=0.0).to(tl.float32)
            if NORM == 2:
                gain += 1.0
            if NORM == 3:
                x -= mean[:, None]
            x = x * factor[:, None] * gain[None, :]
            if NORM == 3:
                if WHOLE:
                    x += tl.load(norm_bias_ptr + k0 + at).to(tl.float32)[None, :]
                else:
                    x += tl.load(norm_bias_ptr + k0 + at, mask=at < left, other=0.0).to(tl.float32)[None, :]
        x = round_to(x, dtype)
        if W_BITS == 0:
            k_acc = dot(x, tl.trans(load_weight(k_weight_ptr + k_below, at, left, WHOLE)), k_acc)
            v_acc = dot(x, tl.trans(load_weight(v_weight_ptr + v_below, at, left, WHOLE)), v_acc)
            k_weight_ptr += BK * kwk
            v_weight_ptr += BK * vwk
        else:
            groups = tl.cdiv(features, W_GROUP)
            factors = columns_of(x, W_BITS)
            k_acc = add_packed(
                k_acc, k_weight_ptr, k_below, k0, groups, factors, W_BITS, W_GROUP, BK, WHOLE, PTX, dtype
            )
            v_acc = add_packed(
                v_acc, v_weight_ptr, v_below, k0, groups, factors, W_BITS, W_GROUP, BK, WHOLE, PTX, dtype
            )
    if W_BITS != 0:
        k_acc, v_acc = tl.trans(k_acc), tl.trans(v_acc)
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


def _words(name: str, data: Tensor, bits: int) -> tuple[Tensor, tuple[int, ...]]:
    """(what a kernel reads, strides) of values or of packed rows: of these words, and strides in units of 16 bytes."""
    if not bits:
        return data, data.stride()
    strides = data.stride()[:-1]
    if any(stride % UNIT for stride in strides) or data.storage_offset() % UNIT:
        fail("kv_from_activation", name, f"must have rows at multiples of {UNIT} bytes, got strides {strides}")
    return data.view(torch.uint32), (*(stride // UNIT for stride in strides), 1)


TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def tile(tokens: int, lanes: int, packed: bool) -> KVTile:
    """The tile for so many tokens."""
    return (PACKED_TILES if packed else TILES)["few" if tokens <= 16 else "many" if lanes <= 128 else "wide"]


def _constants(
    chosen: KVTile, features: int, norm: str, x: tuple[int, int], w: tuple[int, int], amd: bool
) -> dict[str, Any]:
    whole = not amd and features % chosen.features == 0
    tiles = next(t for t in (4, 2, 1) if not whole or features % (t * chosen.features) == 0)
    return {
        "NORM": NORMS[norm], "X_BITS": x[0], "X_GROUP": x[1], "W_BITS": w[0], "W_GROUP": w[1],
        "BM": chosen.tokens, "BK": chosen.features, "TILES": tiles, "WHOLE": whole,
        "PTX": not amd and not triton.knobs.runtime.interpret,
    }  # fmt: skip


def kv_from_activation(pool: Tensor, states: States, slots: Tensor, by: Projection, layout: BlockLayout) -> None:
    """Fill slots int64 [T] of the pool; arguments checked as the operator does.

    A slot below 0 or beyond the pool is left out.
    """
    check_device("kv_from_activation", "pool", pool)
    if slots.numel() == 0:
        return
    view = paged_view(pool, layout)
    x_format, w_format = (states.bits, max(1, states.group)), by.weight_bits()
    chosen = tile(slots.numel(), view.constants["DP"], w_format[0] > 0)
    given, x_strides = _words("x", states.x, states.bits)
    k_rows, k_strides = _words("k_weight", by.k_weight, w_format[0])
    v_rows, v_strides = _words("v_weight", by.v_weight, w_format[0])
    tables = [t.stride(0) if t is not None else 0 for t in (by.cos, by.sin)]
    wanted = stages(chosen.num_stages)
    kv_from_activation_kernel[(triton.cdiv(slots.numel(), chosen.tokens), layout.kv_heads)](
        given, slots, k_rows, v_rows, by.norm_weight, by.norm_bias, by.k_bias, by.v_bias, by.cos, by.sin,
        *view.pointers, slots.numel(), states.features, pool.shape[0] * layout.tokens, by.eps,
        x_strides[0], *k_strides, *v_strides, *tables, *view.strides,
        ROTARY=by.cos.shape[1] if by.cos is not None else 0, STAGES=wanted, dtype=TRITON_DTYPES[layout.dtype],
        **_constants(chosen, states.features, by.norm, x_format, w_format, torch.version.hip is not None),
        **view.constants, num_warps=chosen.num_warps, num_stages=wanted,
    )  # fmt: skip


class _AuditedModel(NamedTuple):
    """What an audited launch is made for."""

    dtype: str
    features: int
    kv_heads: int
    dim: int
    norm: str
    rotary: bool


OPT_30B = _AuditedModel("fp16", 7168, 56, 128, "layer", False)
LLAMA_2_7B = _AuditedModel("bf16", 4096, 32, 128, "rms", True)


def _case(
    name: str, tokens: int, model: _AuditedModel, format: str = "native", weights: str = "native",
    activation: str = "native", amd: bool = False,
) -> AuditCase:  # fmt: skip
    dtype, features, kv_heads, dim, norm, rotary = model
    torch_dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    layout = BlockLayout(64, kv_heads, dim, format, torch_dtype)
    view = paged_view(torch.empty(1, layout.record_nbytes, dtype=torch.uint8), layout)
    w, kept = WEIGHT_FORMATS[weights], ACTIVATION_FORMATS.get(activation, NATIVE)
    (w_bits, w_group), (x_bits, x_group) = ((f.bits, max(1, f.group_size)) for f in (w, kept))
    chosen = tile(tokens, view.constants["DP"], w_bits > 0)
    bias = norm == "layer"
    present = {
        "x_ptr": True, "slots_ptr": True, "k_weight_ptr": True, "v_weight_ptr": True,
        "norm_weight_ptr": bool(norm), "norm_bias_ptr": bias, "k_bias_ptr": bias, "v_bias_ptr": bias,
        "cos_ptr": rotary, "sin_ptr": rotary, "k_ptr": True, "v_ptr": True,
        "k_pairs_ptr": bool(layout.bits), "v_pairs_ptr": bool(layout.bits),
    }  # fmt: skip
    kinds = dict.fromkeys(present, f"*{dtype}") | {"slots_ptr": "*i64", "k_pairs_ptr": "*i32", "v_pairs_ptr": "*i32"}
    packed = {"x_ptr": x_bits, "k_weight_ptr": w_bits, "v_weight_ptr": w_bits}
    kinds |= {n: "*u32" for n, bits in packed.items() if bits}
    if layout.bits:
        kinds |= {"k_ptr": "*u8", "v_ptr": "*u8"}
    signature = {n: kinds[n] if there else "constexpr" for n, there in present.items()}
    strides = ("xs", "kwh", "kwn", "kwk", "vwh", "vwn", "vwk", "cs", "ss", "kb", "kh", "kr", "vb", "vh", "vr", "pb",
               "ph")  # fmt: skip
    signature |= dict.fromkeys(("tokens", "features", "slot_count", *strides), "i32") | {"eps": "fp32"}
    constants: dict[str, Any] = {n: None for n, there in present.items() if not there}
    ones = ("kwk", "vwk")  # a launch makes a stride of 1 a constant
    signature |= dict.fromkeys(ones, "constexpr")
    constants |= dict.fromkeys(ones, 1)
    amd_stages = min(chosen.num_stages, AMD_STAGES)
    constants |= _constants(chosen, features, norm, (x_bits, x_group), (w_bits, w_group), amd)
    constants |= {
        "ROTARY": dim if rotary else 0, "STAGES": amd_stages if amd else chosen.num_stages,
        "dtype": TRITON_DTYPES[torch_dtype], "PTX": not amd,
    }  # fmt: skip
    row, x_row = w.row_nbytes(features, 2), kept.row_nbytes(features, 2)
    # 1024 activations and one head's weights stay in L2 while its programs run: counted is what crosses from memory.
    nbytes = 2 * kv_heads * dim * row + tokens * (x_row + 8 + kv_heads * layout.position_nbytes)
    loose = (*ones, *(("xs",) if x_bits else ()), *(("kwh", "kwn", "vwh", "vwn") if w_bits else ()))
    pointers = (n for n, kind in signature.items() if kind.startswith("*"))
    return AuditCase(
        name=f"kv_from_activation/{name}/{tokens}x{features}x{kv_heads}x{dim}-{dtype}{'/amd' if amd else ''}",
        fn=kv_from_activation_kernel,
        signature=signature,
        constants=constants | view.constants,
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        amd_stages=amd_stages,
        divisible=tuple(n for n in (*pointers, *strides, "features") if n not in loose),
        uses_dot=True,
        main_operands=3,
        bytes_moved=nbytes,
        minimum_bytes=nbytes,
        turn_nbytes=2 * dim * row * chosen.features // features,
        archs=("gfx942",) if amd else ("sm_80", "sm_90"),
    )


def audit_cases() -> list[AuditCase]:
    """OPT-30B (layer norm, biases) and Llama-2-7B (RMS norm, rotary), from 16 and from 1024 tokens."""
    opt, llama, few = (1024, OPT_30B), (1024, LLAMA_2_7B), (16, LLAMA_2_7B)
    return [
        case
        for amd in (False, True)
        for case in (
            _case("opt", *opt, amd=amd),
            _case("llama", *llama, amd=amd),
            _case("llama-few", *few, amd=amd),
            _case("llama-block8", *llama, format="block8", amd=amd),
            _case("opt-act8-block4", *opt, format="block4", activation="act8", amd=amd),
            _case("llama-w4", *llama, weights="w4g64", amd=amd),
            _case("llama-w4-few", *few, weights="w4g64", amd=amd),
            _case("llama-w8", *llama, weights="w8", amd=amd),
            _case("opt-w4-act8", *opt, weights="w4g128", activation="act8", amd=amd),
            _case("llama-act8", *llama, activation="act8", amd=amd),
        )
    ]
