"""`forebay::attention` on the CPU."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from forebay.kernels.attention.attention.reference import check, fail, first_seen, refuse_start, softmax_with
from forebay.kernels.attention.chosen_rows import attend_chosen
from forebay.kernels.attention.scoring import NOTHING, AttentionExtras
from forebay.kernels.cpu_support import native


class AttentionArgs(ctypes.Structure):
    """Mirror of `AttentionArgs` in attention.cpp; strides are in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "start", "out", "sinks")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "queries", "length", "head_dim")),
        *((f"{t}_{d}", ctypes.c_int64) for t in "qkv" for d in ("batch", "head", "row")),
        *((name, ctypes.c_int64) for name in ("out_batch", "out_row", "out_head", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_int32) for name in ("dtype", "parts")),
    )


MAX_HEAD_DIM = 1024  # that of attention.cpp
# Queries per piece without the C++ kernel: bounds mask and scores.
QUERY_STEP = 128
# Stack per thread of the C++ kernel: query rows and their results of 11264 floats, 88 x 64 scores, a panel of 16 KiB of
# keys or values, and 8 rows of a quarter of it and 16 floats more on their way there. In bf16, where the processor
# multiplies it: half the numbers for query rows, but for each 128 scores, 160 halves of probabilities, 16 partial sums
# and 32 floats of room, and nothing on its way.
NATIVE_NBYTES = 4 * (2 * 11264 + 88 * 64 + 4096 + 8 * (256 + 16))
NATIVE_BF16_NBYTES = 4 * (11264 + 11264 // 2 + 88 * (128 + 80 + 16 + 32) + 4096)
# The C++ kernels give the positions that a sequence sees to several tasks, in parts of 256 or more, where sequences and
# heads make too few. Results depend on the number of threads only so far.
PART, PARTS_MOST, PARTS_ROWS = 256, 32, 32


def workspace_nbytes(
    batch: int, heads: int, kv_heads: int, queries: int, length: int, head_dim: int, dtype: torch.dtype, softcap: float,
    by_torch: bool = False,
) -> int:
    """Upper bound, in bytes, of what attention_out takes in addition to its arguments, for the kernel present here."""
    if head_dim <= MAX_HEAD_DIM and native.load() is not None and not (by_torch and queries > 1):
        parts = parts_of(batch, heads, kv_heads, queries, length)
        stack = max(NATIVE_NBYTES, NATIVE_BF16_NBYTES) if dtype == torch.bfloat16 else NATIVE_NBYTES
        return stack * torch.get_num_threads() + 4 * part_floats(batch, heads, queries, head_dim, parts)
    rows = min(queries, QUERY_STEP)
    itemsize = max(4, dtype.itemsize)
    # Explicit scores, probabilities and mask of a piece, K and V in fp32 and expanded for groups, and the result. The
    # count is for every sequence of equal length at once; torch's fused kernel takes less.
    scores = 6 * batch * heads * rows * length * itemsize
    expanded = 4 * batch * heads * length * head_dim * itemsize
    del kv_heads, softcap
    return scores + expanded + 6 * batch * heads * rows * head_dim * itemsize + (1 << 20)


def parts_of(batch: int, heads: int, kv_heads: int, queries: int, length: int) -> int:
    """Into how many parts, at most, tasks cut the positions of a cache of `length`."""
    few = batch * kv_heads < 4 * torch.get_num_threads() and queries * heads <= PARTS_ROWS * kv_heads
    return max(1, min(PARTS_MOST, length // PART)) if few else 1


def part_floats(batch: int, heads: int, queries: int, head_dim: int, parts: int) -> int:
    """fp32 numbers of scratch in which parts wait to be put together."""
    return 0 if parts == 1 else batch * heads * queries * parts * (2 + -(-head_dim // 16) * 16)


def _check_out(q: Tensor, out: Tensor) -> None:
    batch, heads, queries, dim = q.shape
    if out.shape != (batch, queries, heads, dim) or out.dtype != q.dtype:
        wanted = (batch, queries, heads, dim)
        fail("out", f"must be {wanted} of {q.dtype}, got {tuple(out.shape)} of {out.dtype}")


def _begins(q: Tensor, k: Tensor, start: Tensor) -> list[int]:
    """start as numbers; ValueError where the queries would stand outside the cache."""
    begins: list[int] = start.tolist()
    if begins and (min(begins) < 0 or max(begins) + q.shape[2] > k.shape[2]):
        refuse_start(q, k, start)
    return begins


def _torch_piece(
    q: Tensor, k: Tensor, v: Tensor, begin: int, scale: float, window: int, softcap: float, out: Tensor,
    extras: AttentionExtras,
) -> None:
    """Queries q [B, H, S, D] at positions begin .. begin + S - 1 of every sequence, into out [B, S, H, D]."""
    queries, (sinks, until, _) = q.shape[2], extras
    low = max(0, first_seen(begin, window))
    end = begin + queries if until is None else int(until.max())
    k, v = k[:, :, low:end], v[:, :, low:end]
    position = torch.arange(begin, begin + queries)[:, None]
    t = torch.arange(low, end)
    seen = t >= first_seen(position, window)
    seen = seen & (t <= position) if until is None else (seen & (t < until[:, :, None]))[:, None]
    if softcap > 0 or sinks is not None:
        batch, heads, _, dim = q.shape
        grouped = q.float().reshape(batch, k.shape[1], -1, dim)
        scores = torch.matmul(grouped, k.float().mT).mul_(scale / (softcap or 1.0))
        if softcap > 0:
            scores = scores.tanh_().mul_(softcap)
        scores = softmax_with(scores.view(batch, heads, queries, -1).masked_fill_(~seen, -math.inf), sinks)
        y = torch.matmul(scores.view(batch, k.shape[1], -1, t.numel()), v.float()).view(q.shape)
    else:
        mask = None if queries == 1 else seen
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    out.copy_(y.transpose(1, 2))


def _torch_attention(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, scale: float, window: int, softcap: float, out: Tensor,
    extras: AttentionExtras = NOTHING,
) -> None:
    """By torch, sequences of equal start together: nothing beyond a sequence's end is read, be it NaN or not."""
    begins, (sinks, until, _) = _begins(q, k, start), extras
    if until is not None and bool(((until <= torch.arange(q.shape[2]) + start[:, None])
                                   | (until > start[:, None] + q.shape[2])).any()):
        fail("until", "must be after a query's own position, and within those of the step")
    for begin in dict.fromkeys(begins):
        rows = [b for b, other in enumerate(begins) if other == begin]
        spans = [slice(None)] if len(rows) == len(begins) else [slice(b, b + 1) for b in rows]
        for span in spans:
            for s0 in range(0, q.shape[2], QUERY_STEP):
                s1 = min(q.shape[2], s0 + QUERY_STEP)
                piece = q[span, :, s0:s1], k[span], v[span], begin + s0
                of_piece = AttentionExtras(sinks, None if until is None else until[span, s0:s1])
                _torch_piece(*piece, scale, window, softcap, out[span, s0:s1], of_piece)


def bind_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    scale: float,
    window: int,
    softcap: float,
    out: Tensor,
    extras: AttentionExtras = NOTHING,
) -> Callable[[], None]:
    """A closure over CPU tensors that fills out [B, S, H, D] from their present contents, start's too.

    Strides and pointers are settled here, the closure keeps the tensors alive. ValueError for a wrong shape or dtype
    here, and for a start outside the cache at the call, before anything is written.
    """
    check(q, k, v, start, *extras)
    sinks = extras.sinks
    until = None if q.shape[2] == 1 else extras.until  # one query sees itself, and nothing after it
    _check_out(q, out)
    if start.device.type != "cpu" or q.device.type != "cpu":
        fail("q" if q.device.type != "cpu" else "start", "must be on the CPU")
    if extras.chosen is not None:
        if window or until is not None:
            fail("chosen", "leaves no place for a window or for until")
        return attend_chosen(q, k, v, start, extras.chosen, out, lambda q, k, v, start, out: bind_attention(
            q, k, v, start, scale, window, softcap, out, AttentionExtras(sinks)))
    library = native.load()
    plain = all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in (q, k, v, out))
    if library is None or not plain or until is not None or q.shape[3] > library.forebay_attention_max_head_dim():
        return lambda: _torch_attention(q, k, v, start, scale, window, softcap, out, extras)
    for name, tensor in (("start", start), ("sinks", sinks)):
        if tensor is not None and not tensor.is_contiguous():
            fail(name, "must be contiguous")
    batch, heads, queries, dim = q.shape
    parts = parts_of(batch, heads, k.shape[1], queries, k.shape[2])
    args = AttentionArgs(
        *(None if t is None else t.data_ptr() for t in (q, k, v, start, out, sinks)),
        batch, heads, k.shape[1], queries, k.shape[2], dim,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        window, scale, softcap, native.DTYPES[q.dtype], parts,
    )  # fmt: skip
    floats = part_floats(batch, heads, queries, dim, parts)
    return native.NativeCall("attention", args, (q, k, v, start, out, sinks), floats, lambda: refuse_start(q, k, start))


def attention_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    scale: float,
    window: int,
    softcap: float,
    out: Tensor,
    extras: AttentionExtras = NOTHING,
) -> None:
    """Fill out [B, S, H, D]; see the module's docstring and bind_attention."""
    bind_attention(q, k, v, start, scale, window, softcap, out, extras)()
