"""`forebay::expanded_attention` on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from forebay.kernels.attention.attention.cpu import NATIVE_BF16_NBYTES, NATIVE_NBYTES, QUERY_STEP
from forebay.kernels.attention.attention.reference import first_seen, refuse_start
from forebay.kernels.attention.expanded_attention.reference import PLAIN, ExpandedSizes, RowCodes, check, expanded, fail
from forebay.kernels.attention.scoring import Scoring
from forebay.kernels.cache.kv_append_q.reference import unpack
from forebay.kernels.cpu_support import native


class ExpandedAttentionArgs(ctypes.Structure):
    """Mirror of `ExpandedAttentionArgs` in expanded_attention.cpp; strides are in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "rows", "start", "up", "out")),
        *((name, ctypes.c_int64) for name in (
            "batch", "heads", "queries", "length", "rank", "rotated", "plain", "value", "most", "lot", "q_batch",
            "q_head", "q_row", "row_batch", "row", "out_batch", "out_row", "out_head", "window", "group")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_int32) for name in ("dtype", "bits")),
    )


LOT = 256  # cached rows that the C++ kernel expands at a time, at most: as many share a panel of the matrix
TORCH_EXPANDED = 1024  # the same without it
MOST_ROWS = 2048  # query rows of a task, whose results wait in its scratch


def task_rows(sizes: ExpandedSizes) -> int:
    """Query rows of a task: all of a head's where that keeps all threads busy, because each task expands anew."""
    pieces = max(-(-sizes.queries // MOST_ROWS), -(-torch.get_num_threads() // max(1, sizes.batch * sizes.heads)))
    return max(1, -(-sizes.queries // pieces))


def lot_of(length: int) -> int:
    """Cached rows that the C++ kernel expands at a time."""
    return min(LOT, -(-length // 16) * 16)


def scratch_floats(sizes: ExpandedSizes) -> int:
    """Most scratch of a task of the C++ kernel, in floats: latents, their products, keys, values, and the result and
    softmax of each query row; of packed rows their values too. Vectors are of 16 floats at most, and some rows lie 64
    bytes apart."""
    row = (sizes.rank + 64) + (sizes.made + 32) + (sizes.dim + 64) + (sizes.value + 64)
    row += sizes.rank + sizes.dim - sizes.plain
    return lot_of(sizes.length) * row + task_rows(sizes) * (sizes.value + 32 + 16 + 8) + 128


def _has_kernel(dim: int, value: int, packed: int = 0) -> bool:
    """Return whether the C++ kernel takes such heads, and packed rows of so many numbers."""
    library = native.load()
    return library is not None and max(dim, value) <= library.forebay_attention_max_head_dim() and (
        packed <= library.forebay_cache_max_head_dim())


def workspace_nbytes(sizes: ExpandedSizes, dtype: torch.dtype, packed: bool = False) -> int:
    """Upper bound of a call's workspace in bytes, for the kernel present here, over `packed` rows or others."""
    width = sizes.rank + sizes.dim - sizes.plain if packed else 0
    if _has_kernel(sizes.dim, sizes.value, width):
        stack = NATIVE_BF16_NBYTES if dtype == torch.bfloat16 else NATIVE_NBYTES
        return torch.get_num_threads() * (4 * scratch_floats(sizes) + stack)
    _, heads, queries, length, rank, dim, _, value = sizes
    there, rows = min(length, TORCH_EXPANDED), min(queries, QUERY_STEP)
    kept = heads * queries * (dim + 3 * value + 4)  # queries, results and softmaxes of a sequence
    made = there * (5 * width + rank + heads * (3 * sizes.made + 2 * dim)) + heads * sizes.made * rank
    return 4 * (kept + made + 5 * heads * rows * there) + (1 << 20)


def bind_expanded_attention(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, scoring: Scoring, up: Tensor, plain: int, out: Tensor,
    codes: RowCodes = PLAIN,
) -> Callable[[], None]:
    """A closure over CPU tensors that fills out [B, S, H, value] from their present contents, start's too.

    Strides and pointers are settled here, the closure keeps the tensors alive. ValueError for a wrong shape or dtype
    here, and for a start outside the cache at the call, before anything is written.
    """
    check(q, k, v, start, up, plain, codes)
    batch, heads, queries, dim = q.shape
    value, rank = up.shape[1] - plain, up.shape[2]
    sizes = ExpandedSizes(batch, heads, queries, k.shape[2], rank, dim, plain, value)
    if out.shape != (batch, queries, heads, value) or out.dtype != q.dtype:
        fail("out", f"must be {(batch, queries, heads, value)} of {q.dtype}, got {tuple(out.shape)} of {out.dtype}")
    plainly = all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in (q, k, out)) and up.is_contiguous()
    if not plainly or not _has_kernel(dim, value, rank + dim - plain if codes.bits else 0):
        return lambda: _by_torch(q, k, start, scoring, up, plain, out, codes)
    args = ExpandedAttentionArgs(
        *(t.data_ptr() for t in (q, k, start, up, out)), *sizes[:5], dim - plain, plain, value, task_rows(sizes),
        lot_of(k.shape[2]), *q.stride()[:3], k.stride(0), k.stride(2), *out.stride()[:3], scoring.window, codes.group,
        scoring.scale, scoring.softcap, native.DTYPES[q.dtype], codes.bits,
    )  # fmt: skip
    floats = torch.get_num_threads() * scratch_floats(sizes)
    return native.NativeCall("expanded_attention", args, (q, k, start, up, out), floats,
                             lambda: refuse_start(q, k, start))


def _by_torch(
    q: Tensor, k: Tensor, start: Tensor, scoring: Scoring, up: Tensor, plain: int, out: Tensor, codes: RowCodes
) -> None:
    """Sequence by sequence, with some cached rows expanded at a time and the online softmax across them, in fp32."""
    begins: list[int] = start.tolist()
    if begins and (min(begins) < 0 or max(begins) + q.shape[2] > k.shape[2]):
        refuse_start(q, k, start)
    matrices = up.float()
    for b, begin in enumerate(begins):
        queries = q[b].float()  # [H, S, D]
        heads, count, value = *queries.shape[:2], out.shape[-1]
        top = queries.new_full((heads, count, 1), -torch.inf)
        total, found = torch.zeros_like(top), queries.new_zeros(heads, count, value)
        for t0 in range(max(0, first_seen(begin, scoring.window)), begin + count, TORCH_EXPANDED):
            t1 = min(begin + count, t0 + TORCH_EXPANDED)
            rows = k[b : b + 1, :, t0:t1]
            rows = unpack(rows, up.shape[2] + q.shape[3] - plain, *codes) if codes.bits else rows.float()
            keys, values = (each[0] for each in expanded(rows, matrices, plain))
            t = torch.arange(t0, t1)
            for s0 in range(0, count, QUERY_STEP):
                span = slice(s0, min(count, s0 + QUERY_STEP))
                scores = torch.matmul(queries[:, span], keys.mT).mul_(scoring.scale)
                if scoring.softcap > 0:
                    scores = scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
                position = torch.arange(begin + s0, begin + span.stop)[:, None]
                scores.masked_fill_((t > position) | (t < first_seen(position, scoring.window)), -torch.inf)
                higher = torch.maximum(top[:, span], scores.amax(-1, keepdim=True))
                base = higher.masked_fill(higher == -torch.inf, 0.0)
                weights, shrink = scores.sub_(base).exp_(), (top[:, span] - base).exp_()
                total[:, span] = total[:, span] * shrink + weights.sum(-1, keepdim=True)
                found[:, span] = found[:, span] * shrink + torch.matmul(weights, values)
                top[:, span] = higher
        out[b] = (found / total).transpose(0, 1)
