"""`forebay::rotary_append` in Triton: queries turned, keys turned and stored with values, by one launch.

Keys and values are stored as they are or quantised in registers, group by group along D, with the rounding of
`forebay::quantize`; the cache is a pair of tensors or a pool of blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.cache.kv_append.gpu import check_cache
from forebay.kernels.formats.paged import BlockLayout, check_pool
from forebay.kernels.gpu_support.arguments import check_device, check_tensor, fail
from forebay.kernels.gpu_support.audit_case import AuditCase
from forebay.kernels.gpu_support.paged import CacheView, contiguous_view, lane_values, lanes, paged_view
from forebay.kernels.positions.rotary.gpu import check_tables, table_strides, turn
from forebay.kernels.quantization.quantize.gpu import group_codes, group_range, pack_codes

# Elements of D times heads that one program holds: 16 heads of D = 128.
TILE = 2048


@triton.jit
def valid_lanes(HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr):
    """Which lanes [HEADS * DP / GP, GP] hold a value; None where all do."""
    valid = None
    if D != DP or G != GP:
        _, held = lane_values(D, DP, G, GP)
        valid = tl.reshape(held[None, :] & (tl.zeros((HEADS, DP), tl.int32) == 0), (HEADS * DP // GP, GP))
    return valid


@triton.jit
def quantize_heads(
    x, dtype: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Lanes [HEADS, DP] in fp32 -> bytes of codes [HEADS, DP * BITS / 8], and words (scale, low) [HEADS, DP / GP]."""
    valid = valid_lanes(HEADS, D, DP, G, GP)
    groups = tl.reshape(x, (HEADS * DP // GP, GP))
    scale, low = group_range(groups, valid, dtype, BITS)
    codes = pack_codes(group_codes(groups, valid, scale, low, BITS, False), scale, BITS, 1)
    scale_bits = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    word = scale_bits | (low.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return tl.reshape(codes, (HEADS, DP * BITS // 8)), tl.reshape(word, (HEADS, DP // GP))


@triton.jit
def store_heads(
    x, ptr, pairs_ptr, block, inside, head, used, stride_block, stride_head, stride_row, pairs_block, pairs_head,
    dtype: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Lanes [HEADS, DP] of one position to row `inside` of block `block`, as they are or quantised."""
    row = ptr + block * stride_block + inside * stride_row + head[:, None] * stride_head
    if BITS == 0:
        d, valid = lane_values(D, DP, G, GP)
        tl.store(row + d[None, :], x, mask=used[:, None] & valid[None, :])
    else:
        GROUPS: tl.constexpr = (D + G - 1) // G
        PER_BYTE: tl.constexpr = 8 // BITS
        codes, word = quantize_heads(x.to(tl.float32), dtype, HEADS, D, DP, G, GP, BITS)
        at, valid = lane_values(GROUPS * G // PER_BYTE, DP // PER_BYTE, G // PER_BYTE, GP // PER_BYTE)
        tl.store(row + at[None, :], codes, mask=used[:, None] & valid[None, :])
        group = tl.arange(0, DP // GP)
        pair = pairs_ptr + block * pairs_block + inside * GROUPS + head[:, None] * pairs_head
        tl.store(pair + group[None, :], word, mask=used[:, None] & (group < GROUPS)[None, :])


@triton.jit
def load_heads(
    ptr, cos_ptr, sin_ptr, head, used, stride,
    ROTATE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Lanes [HEADS, DP] of one token, turned where ROTATE says so; the other half of a head comes from L1."""
    d, valid = lane_values(D, DP, G, GP)
    inside = used[:, None] & valid[None, :]
    row = ptr + head[:, None] * stride
    x = tl.load(row + d[None, :], mask=inside, other=0.0)
    if ROTATE:
        other = tl.where(d < D // 2, d + D // 2, d - D // 2)
        partner = tl.load(row + other[None, :], mask=inside, other=0.0)
        cos = tl.load(cos_ptr + d, mask=valid, other=0.0)[None, :]
        sin = tl.load(sin_ptr + d, mask=valid, other=0.0)[None, :]
        x = turn(x, partner, cos, sin, tl.where(d < D // 2, -1.0, 1.0)[None, :])
    return x


@triton.jit
def rotary_append_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, place_ptr, out_ptr, k_cache_ptr, v_cache_ptr, k_pairs_ptr, v_pairs_ptr,
    queries, q_heads, heads, blocks, capacity,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, cb, cs, nb, ns, ob, oh, os,
    kcb, kch, kcl, vcb, vch, vcl, pb, ph,
    ROTATE: tl.constexpr, HEADS: tl.constexpr, Q_BLOCKS: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Program (token, block of heads): first the blocks of q's heads, then those of k's and v's.

    place_ptr: where TOKENS is 0 the first position of each sequence, else the slot of each token.
    """
    token = tl.program_id(0)
    b = (token // queries).to(tl.int64)
    s = (token % queries).to(tl.int64)
    cos_at = cos_ptr
    sin_at = sin_ptr
    if ROTATE:
        cos_at += b * cb + s * cs
        sin_at += b * nb + s * ns
    if Q_BLOCKS > 0:  # noqa: SIM102 (decided at compile time: without queries their pointers are None)
        if tl.program_id(1) < Q_BLOCKS:
            head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
            used = head < q_heads
            turned = load_heads(q_ptr + b * qb + s * qs, cos_at, sin_at, head, used, qh, ROTATE, D, DP, D, DP)
            d = tl.arange(0, DP)[None, :]
            tl.store(out_ptr + b * ob + s * os + head[:, None] * oh + d, turned, mask=used[:, None] & (d < D))
    if tl.program_id(1) >= Q_BLOCKS:
        head = ((tl.program_id(1) - Q_BLOCKS) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        if TOKENS == 0:
            block = b
            inside = tl.load(place_ptr + b) + s
            fits = (inside >= 0) & (inside < capacity)
        else:
            slot = tl.load(place_ptr + token)
            block = slot // TOKENS
            inside = slot % TOKENS
            fits = (slot >= 0) & (block < blocks)
        dtype = k_ptr.dtype.element_ty
        used = head < heads
        kept = head < tl.where(fits, heads, 0)
        key = load_heads(k_ptr + b * kb + s * ks, cos_at, sin_at, head, used, kh, ROTATE, D, DP, G, GP)
        store_heads(key, k_cache_ptr, k_pairs_ptr, block, inside, head, kept, kcb, kch, kcl, pb, ph,
                    dtype, HEADS, D, DP, G, GP, BITS)  # fmt: skip
        value = load_heads(v_ptr + b * vb + s * vs, cos_at, sin_at, head, used, vh, False, D, DP, G, GP)
        store_heads(value, v_cache_ptr, v_pairs_ptr, block, inside, head, kept, vcb, vch, vcl, pb, ph,
                    dtype, HEADS, D, DP, G, GP, BITS)  # fmt: skip


class Turned(NamedTuple):
    """Queries [B, H, S, D], the tables that turn them and the keys, and where queries go."""

    q: Tensor
    cos: Tensor
    sin: Tensor
    out: Tensor


def _launch(
    turned: Turned | None, k: Tensor, v: Tensor, place: Tensor, view: CacheView, blocks: int, capacity: int
) -> None:
    q, cos, sin, out = turned or (None, None, None, None)
    batch, heads, queries, _ = k.shape
    q_heads = 0 if q is None else q.shape[1]
    block, warps = tile(max(q_heads, heads), view.constants["DP"])
    q_blocks = triton.cdiv(q_heads, block)
    none = (0, 0, 0)
    rotary_append_kernel[(batch * queries, q_blocks + triton.cdiv(heads, block))](
        q, k, v, cos, sin, place, out, *view.pointers, queries, q_heads, heads, blocks, capacity,
        *(none if q is None else q.stride()[:3]), *k.stride()[:3], *v.stride()[:3],
        *(none[:2] if cos is None else table_strides(cos)), *(none[:2] if sin is None else table_strides(sin)),
        *(none if out is None else out.stride()[:3]), *view.strides,
        ROTATE=cos is not None, HEADS=block, Q_BLOCKS=q_blocks, **view.constants, num_warps=warps,
    )  # fmt: skip


def tile(heads: int, wide: int) -> tuple[int, int]:
    """(heads, warps) of one program: 512 elements a warp at most."""
    block = min(triton.next_power_of_2(heads), max(1, TILE // wide))
    return block, min(4, max(1, block * wide // 256))


def _check_turned(op: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    check_tensor(op, "q", q, device=k.device, dtype=k.dtype)
    check_tables(op, q, cos, sin)
    if (q.shape[0], q.shape[2], q.shape[3]) != (k.shape[0], k.shape[2], k.shape[3]):
        fail(op, "q", f"must have B, S and D of k {tuple(k.shape)}, got shape {tuple(q.shape)}")
    check_tensor(op, "out", out, device=k.device, dtype=k.dtype, shape=q.shape)


def rotary_append(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, start: Tensor, k_cache: Tensor, v_cache: Tensor,
    out: Tensor,
) -> None:  # fmt: skip
    """Fill out [B, H, S, D] with q turned, and append k turned and v [B, Hkv, S, D] to the caches [B, Hkv, L, D].

    Token s of sequence b goes to position start[b] + s, start int64 [B]; a position outside the cache is left out.
    Any strides but D's. ValueError names the argument that is wrong, before the launch.
    """
    op = "rotary_append"
    check_cache(op, k_cache, v_cache, k, v, start)
    _check_turned(op, q, k, cos, sin, out)
    if v.shape[3] != k.shape[3]:
        fail(op, "v", f"must have k's head dimension {k.shape[3]}, got {v.shape[3]}")
    if k.numel():
        view = contiguous_view(k_cache, v_cache)
        _launch(Turned(q, cos, sin, out), k, v, start, view, len(k), k_cache.shape[2])


def _check_paged(op: str, k: Tensor, v: Tensor, slots: Tensor, pool: Tensor, layout: BlockLayout) -> None:
    check_pool(op, pool, layout)
    check_device(op, "pool", pool)
    if k.dim() != 4:
        fail(op, "k", f"must be [B, Hkv, S, D], got shape {tuple(k.shape)}")
    shape = (k.shape[0], layout.kv_heads, k.shape[2], layout.head_dim)
    for tensor, name in ((k, "k"), (v, "v")):
        check_tensor(op, name, tensor, device=pool.device, dtype=layout.dtype, shape=shape)
    check_tensor(op, "slots", slots, device=pool.device, dtype=torch.int64, shape=(shape[0], shape[2]))
    if not slots.is_contiguous():
        fail(op, "slots", f"must be contiguous, got strides {slots.stride()}")


def rotary_append_paged(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pool: Tensor, layout: BlockLayout,
    out: Tensor,
) -> None:  # fmt: skip
    """Fill out [B, H, S, D] with q turned, and store k turned and v [B, Hkv, S, D] in the pool at slots int64 [B, S].

    A slot below 0 or beyond the pool is left out. ValueError names the argument that is wrong, before the launch.
    """
    op = "rotary_append_paged"
    _check_paged(op, k, v, slots, pool, layout)
    _check_turned(op, q, k, cos, sin, out)
    if k.numel():
        _launch(Turned(q, cos, sin, out), k, v, slots, paged_view(pool, layout), len(pool), 0)


def kv_append_paged(k: Tensor, v: Tensor, slots: Tensor, pool: Tensor, layout: BlockLayout) -> None:
    """Store k and v [B, Hkv, S, D] in the pool at slots int64 [B, S], for models without rotary positions.

    A slot below 0 or beyond the pool is left out. ValueError names the argument that is wrong, before the launch.
    """
    _check_paged("kv_append_paged", k, v, slots, pool, layout)
    if k.numel():
        _launch(None, k, v, slots, paged_view(pool, layout), len(pool), 0)


def audit_cases() -> list[AuditCase]:
    """Llama-3-8B's heads in bf16: tensors, and pools of blocks of 16 as they are, in 8 and in 4 bits; 512 tokens.

    The last case stores only, without rotation.
    """
    cases = []
    heads, dim, tokens = 8, 128, 512
    for q_heads, bits, paged, group in ((32, 0, 0, dim), (32, 0, 16, dim), (32, 8, 16, 64), (32, 4, 16, 64),
                                        (0, 4, 16, 64)):  # fmt: skip
        constants = lanes(dim, group) | {"BITS": bits, "TOKENS": paged}
        block, warps = tile(max(q_heads, heads), constants["DP"])
        floats = ("q_ptr", "k_ptr", "v_ptr", "cos_ptr", "sin_ptr")
        absent = (*(() if bits else ("k_pairs_ptr", "v_pairs_ptr")),
                  *(() if q_heads else ("q_ptr", "cos_ptr", "sin_ptr", "out_ptr")))  # fmt: skip
        cache, pairs = ("k_cache_ptr", "v_cache_ptr"), ("k_pairs_ptr", "v_pairs_ptr")
        signature = {p: "*bf16" for p in floats} | {"place_ptr": "*i64", "out_ptr": "*bf16"}
        signature |= {p: "*u8" if bits else "*bf16" for p in cache}
        signature |= {p: "*i32" for p in pairs}
        strides = ("qb", "qh", "qs", "kb", "kh", "ks", "vb", "vh", "vs", "cb", "cs", "nb", "ns", "ob", "oh", "os",
                   "kcb", "kch", "kcl", "vcb", "vch", "vcl", "pb", "ph")  # fmt: skip
        numbers = ("queries", "q_heads", "heads", "blocks", "capacity", *strides)
        layout = BlockLayout(paged or 1, heads, dim, f"block{bits}" if bits else "native", torch.bfloat16, group)
        stored, tables = heads * layout.position_nbytes, 2 if q_heads else 0
        nbytes = tokens * (2 * (2 * q_heads + 2 * heads + tables) * dim + 8 + stored)
        cases.append(
            AuditCase(
                name=f"{'rotary' if q_heads else 'kv'}_append{f'_paged/{paged}' if paged else ''}/"
                f"{f'kv{bits}' if bits else 'native'}",
                fn=rotary_append_kernel,
                signature=signature | {n: "i32" for n in numbers} | {p: "constexpr" for p in absent},
                constants=constants
                | {"ROTATE": q_heads > 0, "HEADS": block, "Q_BLOCKS": triton.cdiv(q_heads, block)}
                | {p: None for p in absent},
                num_warps=warps,
                divisible=tuple(p for p in (*floats, "out_ptr", *cache, *pairs, *strides) if p not in absent),
                main_operands=3 if q_heads else 2,
                bytes_moved=nbytes,
                minimum_bytes=nbytes,
                aim={0: 0.6, 8: 0.35, 4: 0.25}[bits],  # quantising is arithmetic
                turn_nbytes=nbytes // (tokens * (triton.cdiv(q_heads, block) + triton.cdiv(heads, block))),
            )
        )
    return cases
