"""`forebay::sparse_values` in Triton: only the value rows that are kept are loaded."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay.kernels.gpu_support.arguments import FLOATS, check_tensor, fail
from forebay.kernels.gpu_support.audit_case import AuditCase
from forebay.kernels.gpu_support.cache_tiles import round_to

# A program loads 64 rows of 32 elements at a time: with fp16 two whole 32-byte sectors of each row.
ROWS, SLICE = 64, 32


@triton.jit
def sparse_values_kernel(
    kept_ptr, index_ptr, v_ptr, out_ptr, heads, groups, queries, keep, dim, vb, vh, vl, ob, os, oh,
    ROWS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head, query, slice of D, the slice fastest): the sum of its kept rows, in fp32."""
    slices = tl.cdiv(dim, SLICE)
    at = (tl.program_id(0) // slices).to(tl.int64)
    s = at % queries
    h = at // queries % heads
    b = at // queries // heads
    d = tl.program_id(0) % slices * SLICE + tl.arange(0, SLICE)
    r = tl.arange(0, ROWS)
    v_at = v_ptr + b * vb + (h // groups) * vh + d[None, :]
    total = tl.zeros((ROWS, SLICE), tl.float32)
    for begin in range(0, keep, ROWS):
        used = r < keep - begin
        index = tl.load(index_ptr + at * keep + begin + r, mask=used, other=0)
        weight = tl.load(kept_ptr + at * keep + begin + r, mask=used, other=0.0).to(tl.float32)
        rows = tl.load(v_at + index[:, None] * vl, mask=used[:, None] & (d < dim)[None, :], other=0.0)
        total += weight[:, None] * rows.to(tl.float32)
    y = tl.sum(total, 0)
    tl.store(out_ptr + b * ob + s * os + h * oh + d, round_to(y, out_ptr.dtype.element_ty), mask=d < dim)


def check(weights: Tensor, v: Tensor, keep: int, out: Tensor) -> None:
    """ValueError names the argument whose dtype, device, shape, stride or value is wrong."""
    op = "sparse_values"
    check_tensor(op, "v", v)
    for tensor, name, wanted in ((weights, "weights", "[B, H, S, T]"), (v, "v", "[B, Hkv, L, D]")):
        if tensor.dim() != 4:
            fail(op, name, f"must be {wanted}, got shape {tuple(tensor.shape)}")
    batch, heads, queries, seen = weights.shape
    check_tensor(op, "weights", weights, device=v.device, dtype=FLOATS)
    if v.shape[0] != batch or v.shape[1] == 0 or heads % v.shape[1] or v.shape[2] < seen:
        fail(op, "v", f"must be [{batch}, a divisor of {heads}, at least {seen}, D], got shape {tuple(v.shape)}")
    if not 0 < keep <= seen:
        fail(op, "keep", f"must be in 1 .. {seen}, got {keep}")
    check_tensor(op, "out", out, device=v.device, dtype=v.dtype, shape=(batch, queries, heads, v.shape[3]))


def sparse_values(weights: Tensor, v: Tensor, keep: int, out: Tensor) -> None:
    """Fill out [B, S, H, D] from attention weights [B, H, S, T] and the value cache v [B, Hkv, L, D], L >= T.

    torch.topk chooses; the gather reads keep rows of v per query and head. ValueError names the argument that is
    wrong, before any launch.
    """
    check(weights, v, keep, out)
    if out.numel() == 0:
        return
    batch, heads, queries, _ = weights.shape
    kept, index = torch.topk(weights, keep, dim=-1, sorted=False)
    sparse_values_kernel[(batch * heads * queries * triton.cdiv(v.shape[3], SLICE),)](
        kept, index, v, out, heads, heads // v.shape[1], queries, keep, v.shape[3], *v.stride()[:3], *out.stride()[:3],
        ROWS=ROWS, SLICE=SLICE, num_warps=4,
    )  # fmt: skip


def audit_cases() -> list[AuditCase]:
    """OPT-30B, one query of 56 heads, a tenth of 16384 positions kept."""
    heads, dim, keep = 56, 128, 1638
    numbers = ("heads", "groups", "queries", "keep", "dim", "vb", "vh", "vl", "ob", "os", "oh")
    minimum = heads * (keep * (dim * 2 + 4 + 8) + dim * 2)
    return [
        AuditCase(
            name="sparse_values/56x128/fp16",
            fn=sparse_values_kernel,
            signature={"kept_ptr": "*fp32", "index_ptr": "*i64", "v_ptr": "*fp16", "out_ptr": "*fp16"}
            | {n: "i32" for n in numbers},
            constants={"ROWS": ROWS, "SLICE": SLICE},
            num_warps=4,
            divisible=("kept_ptr", "index_ptr", "v_ptr", "out_ptr", "dim", "vb", "vh", "vl", "ob", "os", "oh"),
            # the slices of a query run side by side, so its 19 KiB of indices and weights come from memory once
            bytes_moved=minimum,
            minimum_bytes=minimum,
            turn_nbytes=2 * ROWS * SLICE,
        )
    ]
