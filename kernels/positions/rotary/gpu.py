"""`forebay::rotary` in Triton: one program turns up to 64 heads of one token, so cos and sin are read once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.gpu_support.arguments import check_tensor, fail
from forebay.kernels.gpu_support.cache_tiles import round_to
from forebay.kernels.gpu_support.launches import bound, kernel_call

# Elements of each half of the heads that one program holds: 32 heads of D = 128.
TILE = 2048


@triton.jit
def turn(x, partner, cos, sin, sign):
    """round(round(x cos) + round(sign partner sin)), as torch's operators round one after the other; x's dtype."""
    dtype = x.dtype
    straight = round_to(x.to(tl.float32) * cos.to(tl.float32), dtype).to(tl.float32)
    across = round_to(partner.to(tl.float32) * sin.to(tl.float32), dtype).to(tl.float32)
    return round_to(straight + sign * across, dtype)


@triton.jit
def turn_heads(
    source, stride, target, target_stride, cos_ptr, sin_ptr, heads,
    D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Store the first HEADS of some heads at `source`, turned, to `target`; cos and sin are those of their position."""
    head = tl.arange(0, HEADS)
    d = tl.arange(0, HALF)
    used = d < D // 2
    inside = (head < heads)[:, None] & used[None, :]
    wide = head.to(tl.int64)[:, None]
    x_at = source + wide * stride + d[None, :]
    lower = tl.load(x_at, mask=inside, other=0.0)
    upper = tl.load(x_at + D // 2, mask=inside, other=0.0)
    out_at = target + wide * target_stride + d[None, :]
    cos = tl.load(cos_ptr + d, mask=used)[None, :]
    sin = tl.load(sin_ptr + d, mask=used)[None, :]
    tl.store(out_at, turn(lower, upper, cos, sin, -1.0), mask=inside)
    cos = tl.load(cos_ptr + D // 2 + d, mask=used)[None, :]
    sin = tl.load(sin_ptr + D // 2 + d, mask=used)[None, :]
    tl.store(out_at + D // 2, turn(upper, lower, cos, sin, 1.0), mask=inside)


@triton.jit
def rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, queries, heads, xb, xh, xs, cb, cs, nb, ns, ob, oh, os,
    D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Program (token, block of heads): both halves of every head, turned."""
    token = tl.program_id(0)
    b = (token // queries).to(tl.int64)
    s = (token % queries).to(tl.int64)
    first = (tl.program_id(1) * HEADS).to(tl.int64)
    turn_heads(x_ptr + b * xb + s * xs + first * xh, xh, out_ptr + b * ob + s * os + first * oh, oh,
               cos_ptr + b * cb + s * cs, sin_ptr + b * nb + s * ns, heads - first, D, HALF, HEADS)  # fmt: skip


def tile(heads: int, dim: int) -> tuple[int, int, int]:
    """(half, heads, warps) of one program: 512 elements a warp at most."""
    half = triton.next_power_of_2(dim // 2)
    block = min(triton.next_power_of_2(heads), max(1, TILE // half))
    return half, block, min(4, max(1, block * half // 256))


def check_tables(op: str, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """x is [B, H, S, D] with an even D, cos and sin [B or 1, S, D] of its dtype and device."""
    if x.dim() != 4 or x.shape[3] % 2:
        fail(op, "x" if op == "rotary" else "q", f"must be [B, H, S, D] with an even D, got shape {tuple(x.shape)}")
    batch, _, queries, dim = x.shape
    for table, name in ((cos, "cos"), (sin, "sin")):
        rows = 1 if table.dim() == 3 and table.shape[0] == 1 else batch
        check_tensor(op, name, table, device=x.device, dtype=x.dtype, shape=(rows, queries, dim))


def table_strides(table: Tensor) -> tuple[int, int]:
    """(over sequences, over positions) of a table [B or 1, S, D]."""
    return (table.stride(0) if table.shape[0] > 1 else 0), table.stride(1)


class Turned(NamedTuple):
    """Queries q [B, H, S, D] that a kernel turns while it appends keys, tables [B or 1, S, D], and where q goes."""

    q: Tensor
    cos: Tensor
    sin: Tensor
    out: Tensor

    def arguments(self, op: str, k: Tensor) -> dict[str, Any]:
        """The kernel's arguments by name; ValueError where they do not suit the new keys k [B, Hkv, S, D]."""
        q, cos, sin, out = self
        check_tensor(op, "q", q, device=k.device, dtype=k.dtype)
        check_tables(op, q, cos, sin)
        check_tensor(op, "out", out, device=k.device, dtype=k.dtype, shape=q.shape)
        if (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
            fail(op, "q", f"must have the sequences, positions and D of k {tuple(k.shape)}, got {tuple(q.shape)}")
        strides = (*q.stride()[:3], *out.stride()[:3], *table_strides(cos), *table_strides(sin))
        return {"q_ptr": q, "turned_ptr": out, "cos_ptr": cos, "sin_ptr": sin, "q_heads": q.shape[1],
                **dict(zip(STRIDES, strides, strict=True)), "TURNED": True}


STRIDES = ("qb", "qh", "qs", "ob", "oh", "os", "cb", "cs", "nb", "ns")


def bind_rotary(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Callable[[], None]:
    """rotary as a call without arguments, on the tensors' contents at each call; the checks are made here."""
    check_tensor("rotary", "x", x)
    check_tables("rotary", x, cos, sin)
    check_tensor("rotary", "out", out, device=x.device, dtype=x.dtype, shape=x.shape)
    if x.numel() == 0:
        return lambda: None
    batch, heads, queries, dim = x.shape
    half, block, warps = tile(heads, dim)
    return bound(kernel_call(
        rotary_kernel, (batch * queries, triton.cdiv(heads, block)),
        x, cos, sin, out, queries, heads, *x.stride()[:3], *table_strides(cos), *table_strides(sin), *out.stride()[:3],
        D=dim, HALF=half, HEADS=block, num_warps=warps,
    ))  # fmt: skip
