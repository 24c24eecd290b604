"""`forebay::kv_append_q` in Triton: K and V of new positions rotated, quantised and packed in registers, one launch.

The reference fits ranges in float64. Sums here are in float32, of codes and of distances from the group's low: so
nothing is cancelled, and ranges come out as the reference's but for the rounding of ties to fp16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels import kv_append_q as operator
from forebay.kernels import packing
from forebay.kernels.gpu.arguments import check_tensor
from forebay.kernels.gpu.audit_case import AuditCase
from forebay.kernels.gpu.cache_rows import check_rows, rotation_power, row_strides, unit_of
from forebay.kernels.gpu.paged import lane_values, lanes, round_to
from forebay.kernels.gpu.rotary_append import group_codes, group_range, tile
from forebay.kernels.gpu.rotation import load_rotated


@triton.jit
def squared_error(x, valid, codes, scale, low):
    """The sum over each row of x of what codes in this range are off by, squared."""
    made = codes.to(tl.float32) * scale.to(tl.float32)[:, None] + low.to(tl.float32)[:, None]
    return tl.sum(tl.where(valid, (made - x) * (made - x), 0.0), 1)


@triton.jit
def refitted(x, valid, codes, scale, low):
    """(codes, scale, low) of 4 bits anew, by the range that fits these codes best, where that lowers the error."""
    base = low.to(tl.float32)
    code = codes.to(tl.float32)
    above = tl.where(valid, x - base[:, None], 0.0)
    n = tl.sum(valid.to(tl.float32), 1)
    total = tl.sum(above, 1)
    code_total = tl.sum(code, 1)
    spread = n * tl.sum(code * code, 1) - code_total * code_total
    slope = (n * tl.sum(code * above, 1) - code_total * total) / tl.where(spread > 0.0, spread, 1.0)
    new_scale = round_to(slope, scale.dtype)
    new_low = round_to(base + (total - slope * code_total) / tl.maximum(n, 1.0), scale.dtype)
    new_codes = group_codes(x, valid, new_scale, new_low, 4)
    step = new_scale.to(tl.float32)
    better = (spread > 0.0) & (step > 0.0) & (step < float("inf")) & (tl.abs(new_low.to(tl.float32)) < float("inf"))
    error = squared_error(x, valid, codes, scale, low)
    better = better & (squared_error(x, valid, new_codes, new_scale, new_low) < error)
    codes = tl.where(better[:, None], new_codes, codes)
    return codes, tl.where(better, new_scale, scale), tl.where(better, new_low, low)


@triton.jit
def store_rotated(
    source, row, used, kept,
    HEADS: tl.constexpr, BITS: tl.constexpr, POWER: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """D elements from each of the pointers `source` to packed rows at pointers `row`."""
    GROUPS: tl.constexpr = (D + G - 1) // G
    GROUPS_P: tl.constexpr = DP // GP
    PER_BYTE: tl.constexpr = 8 // BITS
    CODES: tl.constexpr = GROUPS * G // PER_BYTE
    x = tl.reshape(load_rotated(source, used, (POWER + 1) // 2, D, DP, G, GP, POWER), (HEADS * GROUPS_P, GP))
    _, held = lane_values(D, DP, G, GP)
    valid = tl.reshape(held[None, :] & (tl.zeros((HEADS, DP), tl.int32) == 0), (HEADS * GROUPS_P, GP))
    scale, low = group_range(x, valid, tl.float16, BITS)
    codes = group_codes(x, valid, scale, low, BITS)
    if BITS == 4:
        codes, scale, low = refitted(x, valid, codes, scale, low)
        first, second = tl.split(tl.reshape(codes, (HEADS * DP // 2, 2)))
        codes = first | (second << 4)
    at, held = lane_values(CODES, DP // PER_BYTE, G // PER_BYTE, GP // PER_BYTE)
    codes = tl.reshape(codes, (HEADS, DP // PER_BYTE)).to(tl.uint8)
    tl.store(row[:, None] + at[None, :], codes, mask=kept[:, None] & held[None, :])
    halves = (row + CODES).to(tl.pointer_type(tl.float16))
    group = tl.arange(0, GROUPS_P)[None, :]
    mask = kept[:, None] & (group < GROUPS)
    tl.store(halves[:, None] + group, tl.reshape(scale, (HEADS, GROUPS_P)), mask=mask)
    tl.store(halves[:, None] + (group + GROUPS), tl.reshape(low, (HEADS, GROUPS_P)), mask=mask)
    if CODES % 4 != 0:  # a row ends with two bytes of zeros
        tl.store(halves + 2 * GROUPS, tl.zeros((HEADS,), tl.float16), mask=kept)


@triton.jit
def kv_append_q_kernel(
    k_ptr, v_ptr, start_ptr, k_cache_ptr, v_cache_ptr, queries, heads, capacity,
    kb, kh, ks, vb, vh, vs, kcb, kch, kcl, vcb, vch, vcl,
    HEADS: tl.constexpr, UNIT: tl.constexpr, BITS: tl.constexpr, POWER: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Program (token, block of heads, K or V); a token whose position is outside the cache is left out.

    Strides of the caches are multiples of UNIT.
    """
    token = tl.program_id(0)
    b = (token // queries).to(tl.int64)
    s = (token % queries).to(tl.int64)
    position = tl.load(start_ptr + b) + s
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    used = head < heads
    kept = head < tl.where((position >= 0) & (position < capacity), heads, 0)
    if tl.program_id(2) == 0:
        source = k_ptr + b * kb + s * ks + head * kh
        row = k_cache_ptr + b * (kcb // UNIT * UNIT) + position * (kcl // UNIT * UNIT) + head * (kch // UNIT * UNIT)
        store_rotated(source, row, used, kept, HEADS, BITS, POWER, D, DP, G, GP)
    else:
        source = v_ptr + b * vb + s * vs + head * vh
        row = v_cache_ptr + b * (vcb // UNIT * UNIT) + position * (vcl // UNIT * UNIT) + head * (vch // UNIT * UNIT)
        store_rotated(source, row, used, kept, HEADS, BITS, POWER, D, DP, G, GP)


def bind_kv_append_q(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, bits: int, group: int
) -> Callable[[], None]:
    """kv_append_q as a call without arguments, on the tensors' contents at each call; the checks are made here."""
    op = "kv_append_q"
    operator.check(k_cache, v_cache, k, v, start, bits, group)
    check_tensor(op, "k", k, device=k_cache.device)
    check_tensor(op, "v", v, device=k_cache.device, shape=k.shape)
    check_tensor(op, "start", start, device=k_cache.device, dtype=torch.int64)
    if k.numel() == 0:
        return lambda: None
    batch, heads, queries, dim = k.shape
    for cache, name in ((k_cache, "k_cache"), (v_cache, "v_cache")):
        check_rows(op, cache, name, dim)
    strides = (*row_strides(k_cache), *row_strides(v_cache))
    constants = lanes(dim, group) | {"BITS": bits, "POWER": rotation_power(dim), "UNIT": unit_of(*strides)}
    block, warps = tile(heads, constants["DP"])
    return functools.partial(
        kv_append_q_kernel[(batch * queries, triton.cdiv(heads, block), 2)],
        k, v, start, k_cache, v_cache, queries, heads, k_cache.shape[2], *k.stride()[:3], *v.stride()[:3], *strides,
        HEADS=block, **constants, num_warps=warps,
    )  # fmt: skip


def kv_append_q(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, bits: int, group: int
) -> None:
    """Write k and v [B, Hkv, S, D] into packed rows [B, Hkv, L, R] at positions start[b] .. start[b] + S - 1.

    Any strides but D's and a row's. A position outside the cache is left out, as its value is not known to the host.
    ValueError names the argument that is wrong, before the launch.
    """
    bind_kv_append_q(k_cache, v_cache, k, v, start, bits, group)()


def _case(bits: int, heads: int, dim: int, dtype: str, in_suite: bool = True) -> AuditCase:
    """512 tokens."""
    group = packing.cache_group_size(dim, bits)
    row_nbytes = packing.cache_row_nbytes(dim, bits)
    constants: dict[str, Any] = lanes(dim, group) | {"BITS": bits, "POWER": rotation_power(dim)}
    block, warps = tile(heads, constants["DP"])
    pointers = dict.fromkeys(("k_ptr", "v_ptr"), f"*{dtype}") | {"start_ptr": "*i64"}
    pointers |= dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), "*u8")
    strides = ("kb", "kh", "ks", "vb", "vh", "vs")
    numbers = ("queries", "heads", "capacity", *strides, "kcb", "kch", "kcl", "vcb", "vch", "vcl")
    nbytes = 2 * 512 * heads * (dim * (4 if dtype == "fp32" else 2) + row_nbytes)
    return AuditCase(
        name=f"kv_append_q/kv{bits}/{heads}x{dim}-{dtype}",
        fn=kv_append_q_kernel,
        signature=pointers | dict.fromkeys(numbers, "i32"),
        constants=constants | {"HEADS": block, "UNIT": unit_of(row_nbytes)},
        num_warps=warps,
        divisible=(*pointers, *strides),
        main_operands=1,  # the compiler makes one code of the two branches, K's and V's
        bytes_moved=nbytes,
        minimum_bytes=nbytes,
        in_suite=in_suite,
    )


def audit_cases() -> list[AuditCase]:
    """Llama-3-8B, SmolLM2-135M, Gemma-2-9B, and heads of 80, whose groups are not whole blocks of a rotation."""
    return [
        _case(4, 8, 128, "bf16"),
        _case(8, 8, 128, "bf16"),
        _case(4, 3, 64, "fp16"),
        _case(8, 3, 64, "fp32", in_suite=False),
        _case(4, 8, 256, "bf16", in_suite=False),
        _case(4, 32, 80, "fp16"),
        _case(8, 32, 80, "fp16", in_suite=False),
    ]
