"""`forebay::kv_append_q` in Triton: K and V of new positions rotated, quantized and packed in registers, one launch.

The reference fits ranges in float64. Sums here are in float32, of codes and of distances from the group's low: so
nothing is cancelled, and ranges come out as the reference's but for the rounding of ties to fp16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.cache.kv_append_q import reference as operator
from forebay.kernels.gpu_support.arguments import check_tensor, fail
from forebay.kernels.gpu_support.cache_rows import check_rows, rotation_power, row_strides, unit_of
from forebay.kernels.gpu_support.cache_tiles import lane_values, lanes, round_to
from forebay.kernels.gpu_support.launches import bound, kernel_call
from forebay.kernels.gpu_support.rotation import load_rotated, rotated
from forebay.kernels.positions.rotary.gpu import Turned, turn, turn_heads
from forebay.kernels.products.linear.selection import AMD
from forebay.kernels.quantization.quantize.gpu import CODE_BASE, group_codes, group_range, pack_codes

# Elements of D times heads that one program holds: 16 heads of D = 128.
TILE = 2048


@triton.jit
def valid_lanes(HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr):
    """Return which lanes [HEADS * DP / GP, GP] hold a value; None where all do."""
    valid = None
    if D != DP or G != GP:
        _, held = lane_values(D, DP, G, GP)
        valid = tl.reshape(held[None, :] & (tl.zeros((HEADS, DP), tl.int32) == 0), (HEADS * DP // GP, GP))
    return valid


@triton.jit
def squared_error(x, valid, codes, scale, low):
    """The sum over each row of x of what codes in this range are off by, squared."""
    error = codes * scale.to(tl.float32)[:, None] - (x - low.to(tl.float32)[:, None])
    if valid is not None:
        error = tl.where(valid, error, 0.0)
    return tl.sum(error * error, 1)


@triton.jit
def refitted(x, valid, based, scale, low):
    """(CODE_BASE + code, scale, low) of 4 bits anew, by the range that fits these codes best, where that lowers the
    error."""
    base = low.to(tl.float32)
    code = based - CODE_BASE
    above = x - base[:, None]
    n = tl.full(base.shape, x.shape[1], tl.float32)
    if valid is not None:
        above = tl.where(valid, above, 0.0)
        n = tl.sum(valid.to(tl.float32), 1)
    total = tl.sum(above, 1)
    code_total = tl.sum(code, 1)
    spread = n * tl.sum(code * code, 1) - code_total * code_total
    slope = (n * tl.sum(code * above, 1) - code_total * total) / tl.where(spread > 0.0, spread, 1.0)
    new_scale = round_to(slope, scale.dtype)
    new_low = round_to(base + (total - slope * code_total) / tl.maximum(n, 1.0), scale.dtype)
    renewed = group_codes(x, valid, new_scale, new_low, 4, True)
    step = new_scale.to(tl.float32)
    better = (spread > 0.0) & (step > 0.0) & (step < float("inf")) & (tl.abs(new_low.to(tl.float32)) < float("inf"))
    error = squared_error(x, valid, code, scale, low)
    better = better & (squared_error(x, valid, renewed - CODE_BASE, new_scale, new_low) < error)
    based = tl.where(better[:, None], renewed, based)
    return based, tl.where(better, new_scale, scale), tl.where(better, new_low, low)


@triton.jit
def load_quarter(at, partner_at, cos_at, sin_at, sign, there, TURNED: tl.constexpr):
    """A quarter of each block, in fp32, rotated within it; TURNED: the heads are first turned by their position."""
    x = tl.load(at, mask=there, other=0.0)
    if TURNED:
        x = turn(x, tl.load(partner_at, mask=there, other=0.0), tl.load(cos_at), tl.load(sin_at), sign)
    return rotated(x.to(tl.float32), 3, 0)


@triton.jit
def load_blocks(source, stride, heads, cos_ptr, sin_ptr, HEADS: tl.constexpr, D: tl.constexpr, TURNED: tl.constexpr):
    """Rotated blocks [HEADS * D / 32, 32] in fp32 of the first HEADS of some heads, 0 from `heads` on.

    A thread holds whole blocks: stages of strides 1, 2 and 4 are within quarters, of 16 bytes of the source, and those
    of 8 and 16 add and subtract quarters.
    """
    BLOCKS: tl.constexpr = D // 32
    block = tl.arange(0, HEADS * BLOCKS)[:, None]
    head = block // BLOCKS
    there = head < heads
    at = source + head.to(tl.int64) * stride + block % BLOCKS * 32 + tl.arange(0, 8)[None, :]
    partner, cos, sin, sign = at, at, at, 1.0
    if TURNED:  # halves of a head are whole blocks
        upper = block % BLOCKS >= BLOCKS // 2
        partner = at + tl.where(upper, -(D // 2), D // 2)
        sign = tl.where(upper, 1.0, -1.0)
        cos = cos_ptr + block % BLOCKS * 32 + tl.arange(0, 8)[None, :]
        sin = sin_ptr + block % BLOCKS * 32 + tl.arange(0, 8)[None, :]
    a = load_quarter(at, partner, cos, sin, sign, there, TURNED)
    b = load_quarter(at + 8, partner + 8, cos + 8, sin + 8, sign, there, TURNED)
    c = load_quarter(at + 16, partner + 16, cos + 16, sin + 16, sign, there, TURNED)
    d = load_quarter(at + 24, partner + 24, cos + 24, sin + 24, sign, there, TURNED)
    even = tl.join(a + b + (c + d), a + b - (c + d))
    odd = tl.join(a - b + (c - d), a - b - (c - d))
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 1)), (HEADS * BLOCKS, 32)) * 0.125


@triton.jit
def store_rotated(
    source, stride, row, row_stride, heads, fits, cos_ptr, sin_ptr,
    HEADS: tl.constexpr, BLOCKWISE: tl.constexpr, BITS: tl.constexpr, POWER: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """D elements from each of HEADS heads at `source` to packed rows at `row`; heads from `heads` on are not there."""
    GROUPS: tl.constexpr = (D + G - 1) // G
    GROUPS_P: tl.constexpr = DP // GP
    CODES: tl.constexpr = GROUPS * G * BITS // 8
    UNIT: tl.constexpr = 4 if D == DP and G == GP and G * BITS % 32 == 0 else 1
    PER_UNIT: tl.constexpr = 8 * UNIT // BITS
    head = tl.arange(0, HEADS)
    if BLOCKWISE:
        x = load_blocks(source, stride, heads, cos_ptr, sin_ptr, HEADS, D, TURNED)
    else:
        x = load_rotated(source + head.to(tl.int64) * stride, head < heads, (POWER + 1) // 2, D, DP, G, GP, POWER)
    x = tl.reshape(x, (HEADS * GROUPS_P, GP))
    valid = valid_lanes(HEADS, D, DP, G, GP)
    scale, low = group_range(x, valid, tl.float16, BITS)
    codes = group_codes(x, valid, scale, low, BITS, False)
    if BITS == 4:
        codes, scale, low = refitted(x, valid, codes, scale, low)
    kept = head < tl.where(fits, heads, 0)
    rows = row + head.to(tl.int64) * row_stride
    at, held = lane_values(CODES // UNIT, DP // PER_UNIT, G // PER_UNIT, GP // PER_UNIT)
    units = tl.reshape(pack_codes(codes, scale, BITS, UNIT), (HEADS, DP // PER_UNIT))
    starts = rows.to(tl.pointer_type(tl.int32)) if UNIT == 4 else rows
    tl.store(starts[:, None] + at[None, :], units, mask=kept[:, None] & held[None, :])
    halves = (rows + CODES).to(tl.pointer_type(tl.float16))
    group = tl.arange(0, GROUPS_P)[None, :]
    mask = kept[:, None] & (group < GROUPS)
    tl.store(halves[:, None] + group, tl.reshape(scale, (HEADS, GROUPS_P)), mask=mask)
    tl.store(halves[:, None] + (group + GROUPS), tl.reshape(low, (HEADS, GROUPS_P)), mask=mask)
    if CODES % 4 != 0:  # a row ends with two bytes of zeros
        tl.store(halves + 2 * GROUPS, tl.zeros((HEADS,), tl.float16), mask=kept)


@triton.jit
def kv_append_q_kernel(
    k_ptr, v_ptr, start_ptr, k_cache_ptr, v_cache_ptr, queries, heads, capacity, step, tb, ts,
    kb, kh, ks, vb, vh, vs, kcb, kch, kcl, vcb, vch, vcl,
    HEADS: tl.constexpr, BLOCKWISE: tl.constexpr, UNIT: tl.constexpr, BITS: tl.constexpr, POWER: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    q_ptr=None, turned_ptr=None, cos_ptr=None, sin_ptr=None, q_heads=0,
    qb=0, qh=0, qs=0, ob=0, oh=0, os=0, cb=0, cs=0, nb=0, ns=0, TURNED: tl.constexpr = False,
):  # fmt: skip
    """Program (token, block of heads, K or V); a token whose position is outside the cache is left out.

    TURNED: keys are turned on their way. Programs after those of keys and values turn queries.

    Strides of the caches are multiples of UNIT. `step` is what is added from token to token to what start says.
    """
    token = tl.program_id(0)
    b = (token // queries).to(tl.int64)
    s = (token % queries).to(tl.int64)
    position = tl.load(start_ptr + b * tb + s * ts) + s * step
    first = (tl.program_id(1) * HEADS).to(tl.int64)
    fits = (position >= 0) & (position < capacity)
    if TURNED:
        cos_ptr += b * cb + s * cs
        sin_ptr += b * nb + s * ns
        if tl.program_id(2) == 2:
            turn_heads(q_ptr + b * qb + s * qs + first * qh, qh, turned_ptr + b * ob + s * os + first * oh, oh,
                       cos_ptr, sin_ptr, q_heads - first, D, D // 2, HEADS)  # fmt: skip
            heads = 0
    if tl.program_id(2) == 0:
        stride = kch // UNIT * UNIT
        row = k_cache_ptr + b * (kcb // UNIT * UNIT) + position * (kcl // UNIT * UNIT) + first * stride
        store_rotated(k_ptr + b * kb + s * ks + first * kh, kh, row, stride, heads - first, fits, cos_ptr, sin_ptr,
                      HEADS, BLOCKWISE, BITS, POWER, D, DP, G, GP, TURNED)  # fmt: skip
    else:
        stride = vch // UNIT * UNIT
        row = v_cache_ptr + b * (vcb // UNIT * UNIT) + position * (vcl // UNIT * UNIT) + first * stride
        store_rotated(v_ptr + b * vb + s * vs + first * vh, vh, row, stride, heads - first, fits, cos_ptr, sin_ptr,
                      HEADS, BLOCKWISE, BITS, POWER, D, DP, G, GP, False)  # fmt: skip


def tile(heads: int, wide: int) -> tuple[int, int]:
    """(heads, warps) of one program: 512 elements a warp at most."""
    block = min(triton.next_power_of_2(heads), max(1, TILE // wide))
    return block, min(4, max(1, block * wide // 256))


def _constants(
    heads: int, dim: int, group: int, bits: int, itemsize: int, amd: bool = AMD
) -> tuple[dict[str, int], int]:
    """(constants but UNIT, warps) for heads of dim elements.

    Blockwise, a block of 32 to each thread of a warp, rotations and groups of 32 need no exchange between threads.
    """
    constants = lanes(dim, group) | {"BITS": bits, "POWER": rotation_power(dim)}
    blockwise = itemsize == 2 and (constants["DP"], constants["GP"]) == (dim, group) and min(dim, group) >= 32
    block, warps = (32 * (64 if amd else 32) // dim, 1) if blockwise else tile(heads, constants["DP"])
    return constants | {"BLOCKWISE": blockwise, "HEADS": block}, warps


def bind_kv_append_q(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, start: Tensor, bits: int, group: int,
    *out: Tensor, **tables: Tensor,
) -> Callable[[], None]:  # fmt: skip
    """kv_append_q as a call without arguments, on the tensors' contents at each call; the checks are made here.

    With q, cos and sin the keys are turned by these tables on their way, and so is q, into out.
    """
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
    constants, warps = _constants(heads, dim, group, bits, k.element_size())
    blocks, turned = triton.cdiv(heads, constants["HEADS"]), dict[str, Any]()
    if tables:
        if not constants["BLOCKWISE"] or dim < 64:
            fail(op, "q", f"cannot be turned with keys of {dim} {k.dtype} in groups of {group}")
        turned = Turned(**tables, out=out[0]).arguments(op, k)
        blocks = max(blocks, triton.cdiv(tables["q"].shape[1], constants["HEADS"]))
    places = (0, *start.stride()) if start.dim() == 2 else (1, start.stride(0), 0)
    same = k_cache.data_ptr() == v_cache.data_ptr() and k.data_ptr() == v.data_ptr()  # latents
    return bound(kernel_call(
        kv_append_q_kernel, (batch * queries, blocks, 3 if turned else 1 if same else 2),
        k, v, start, k_cache, v_cache, queries, heads, k_cache.shape[2], *places, *k.stride()[:3], *v.stride()[:3],
        *strides,
        UNIT=unit_of(*strides), **constants, num_warps=warps, **turned,
    ))  # fmt: skip
