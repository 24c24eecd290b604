"""`forebay::attention`: causal attention of new queries over the whole cache, with a length for each sequence.

Query s of sequence b stands at position p = start[b] + s and sees the cache positions t <= p, with window w > 0 also
t > p - w, and with w < 0 only those of its own chunk of -w tokens, t >= p // -w * -w. Head h reads KV head
h // (H / Hkv). With softcap c > 0 a score x becomes c tanh(x / c). K and V of the new positions are in the cache
already. The C++ kernel (`cpu/flat_attention.cpp`) reads every visible K and V once per 32 query rows and nothing
beyond; without a compiler torch's scaled dot product attention does the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from forebay.kernels import native

Position = TypeVar("Position", int, Tensor)
# Queries per piece without the C++ kernel: bounds mask and scores.
QUERY_STEP = 128
# Stack per thread of the C++ kernel: 32 query rows and their results of at most 512 floats, and 32 x 64 scores.
NATIVE_NBYTES = 4 * (2 * 32 * 512 + 32 * 64)


def first_seen(position: Position, window: int) -> Position:
    """The lowest position that a query at `position` sees; negative where a window reaches before the first."""
    return position // -window * -window if window < 0 else position - window + 1 if window else position * 0


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Attention in dtype by the definition, on any device: q [B, H, S, D], k and v [B, Hkv, L, D] -> [B, S, H, D]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(group, 1), v.to(dtype).repeat_interleave(group, 1)
    scores = q @ k.mT * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    position = start[:, None, None, None] + torch.arange(q.shape[2], device=q.device)[:, None]
    t = torch.arange(k.shape[2], device=q.device)
    hidden = (t > position) | (t < first_seen(position, window))
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    # What is beyond a sequence's end may be anything, NaN too: it must not be multiplied, not even by zero.
    unwritten = (t >= start[:, None] + q.shape[2])[:, None, :, None]
    return (weights @ v.masked_fill(unwritten, 0.0)).transpose(1, 2)


def workspace_nbytes(
    batch: int, heads: int, kv_heads: int, queries: int, length: int, head_dim: int, dtype: torch.dtype, softcap: float
) -> int:
    """Upper bound, in bytes, of what attention_out takes beside its arguments, for the kernel present here."""
    if head_dim <= 512 and native.load() is not None:
        return NATIVE_NBYTES * torch.get_num_threads()
    rows = min(queries, QUERY_STEP)
    itemsize = max(4, dtype.itemsize)
    # Explicit scores, probabilities and mask of a piece, K and V in fp32 and expanded for groups, and the result. The
    # count is for every sequence of equal length at once; torch's fused kernel takes less.
    scores = 6 * batch * heads * rows * length * itemsize
    expanded = 4 * batch * heads * length * head_dim * itemsize
    del kv_heads, softcap
    return scores + expanded + 6 * batch * heads * rows * head_dim * itemsize + (1 << 20)


def _fail(argument: str, problem: str) -> None:
    raise ValueError(f"attention: {argument} {problem}")


def check(q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> None:
    """ValueError names the argument whose shape or dtype is wrong."""
    for tensor, name in ((q, "q"), (k, "k"), (v, "v")):
        if tensor.dim() != 4:
            _fail(name, f"must have four dimensions, got shape {tuple(tensor.shape)}")
        if tensor.dtype not in native.DTYPES or tensor.dtype != q.dtype:
            _fail(name, f"must be fp32, bf16 or fp16 and of q's dtype {q.dtype}, got {tensor.dtype}")
    batch, heads, _, dim = q.shape
    if k.shape[0] != batch or k.shape[3] != dim:
        _fail("k", f"must be [{batch}, Hkv, L, {dim}] as q asks, got shape {tuple(k.shape)}")
    if k.shape[1] == 0 or heads % k.shape[1]:
        _fail("k", f"must have a number of heads that divides q's {heads}, got {k.shape[1]}")
    if v.shape != k.shape:
        _fail("v", f"must have k's shape {tuple(k.shape)}, got {tuple(v.shape)}")
    if start.dtype != torch.int64 or start.shape != (batch,):
        _fail("start", f"must be int64 of shape {(batch,)}, got {start.dtype} {tuple(start.shape)}")


def _check_out(q: Tensor, out: Tensor) -> None:
    batch, heads, queries, dim = q.shape
    if out.shape != (batch, queries, heads, dim) or out.dtype != q.dtype:
        wanted = (batch, queries, heads, dim)
        _fail("out", f"must be {wanted} of {q.dtype}, got {tuple(out.shape)} of {out.dtype}")


def _refuse_start(q: Tensor, k: Tensor, start: Tensor) -> None:
    _fail("start", f"must leave positions within 0 .. {k.shape[2]}, got {start.tolist()} and {q.shape[2]} queries")


def _begins(q: Tensor, k: Tensor, start: Tensor) -> list[int]:
    """start as numbers; ValueError where the queries would stand outside the cache."""
    begins: list[int] = start.tolist()
    if begins and (min(begins) < 0 or max(begins) + q.shape[2] > k.shape[2]):
        _refuse_start(q, k, start)
    return begins


def _torch_piece(
    q: Tensor, k: Tensor, v: Tensor, begin: int, scale: float, window: int, softcap: float, out: Tensor
) -> None:
    """Queries q [B, H, S, D] at positions begin .. begin + S - 1 of every sequence, into out [B, S, H, D]."""
    queries = q.shape[2]
    low = max(0, first_seen(begin, window))
    k, v = k[:, :, low : begin + queries], v[:, :, low : begin + queries]
    position = torch.arange(begin, begin + queries)[:, None]
    t = torch.arange(low, begin + queries)
    seen = (t <= position) & (t >= first_seen(position, window))
    if softcap > 0:
        batch, heads, _, dim = q.shape
        grouped = q.float().reshape(batch, k.shape[1], -1, dim)
        scores = torch.matmul(grouped, k.float().mT).mul_(scale / softcap).tanh_().mul_(softcap)
        scores = scores.view(batch, heads, queries, -1).masked_fill_(~seen, -math.inf).softmax(-1)
        y = torch.matmul(scores.view(batch, k.shape[1], -1, t.numel()), v.float()).view(q.shape)
    else:
        mask = None if queries == 1 else seen
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    out.copy_(y.transpose(1, 2))


def _torch_attention(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, scale: float, window: int, softcap: float, out: Tensor
) -> None:
    """By torch, sequences of equal start together: nothing beyond a sequence's end is read, be it NaN or not."""
    begins = _begins(q, k, start)
    for begin in dict.fromkeys(begins):
        rows = [b for b, other in enumerate(begins) if other == begin]
        spans = [slice(None)] if len(rows) == len(begins) else [slice(b, b + 1) for b in rows]
        for span in spans:
            for s0 in range(0, q.shape[2], QUERY_STEP):
                s1 = min(q.shape[2], s0 + QUERY_STEP)
                piece = q[span, :, s0:s1], k[span], v[span], begin + s0
                _torch_piece(*piece, scale, window, softcap, out[span, s0:s1])


def bind_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    scale: float,
    window: int,
    softcap: float,
    out: Tensor,
) -> Callable[[], None]:
    """A closure over CPU tensors that fills out [B, S, H, D] from their present contents, start's too.

    Strides and pointers are settled here, the closure keeps the tensors alive. ValueError for a wrong shape or dtype
    here, and for a start outside the cache at the call, before anything is written.
    """
    check(q, k, v, start)
    _check_out(q, out)
    if start.device.type != "cpu" or q.device.type != "cpu":
        _fail("q" if q.device.type != "cpu" else "start", "must be on the CPU")
    library = native.load()
    plain = all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in (q, k, v, out))
    if library is None or not plain or q.shape[3] > library.forebay_attention_max_head_dim():
        return lambda: _torch_attention(q, k, v, start, scale, window, softcap, out)
    if not start.is_contiguous():
        _fail("start", "must be contiguous")
    args = native.AttentionArgs(
        *(t.data_ptr() for t in (q, k, v, start, out)),
        q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3],
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        window, scale, softcap, native.DTYPES[q.dtype],
    )  # fmt: skip
    return native.NativeCall("attention", args, (q, k, v, start, out), refuse=lambda: _refuse_start(q, k, start))


def attention_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    scale: float,
    window: int,
    softcap: float,
    out: Tensor,
) -> None:
    """Fill out [B, S, H, D]; see the module's docstring and bind_attention."""
    bind_attention(q, k, v, start, scale, window, softcap, out)()


@torch.library.custom_op("forebay::attention", mutates_args=(), device_types="cpu")
def attention(q: Tensor, k: Tensor, v: Tensor, start: Tensor, scale: float, window: int, softcap: float) -> Tensor:
    """q [B, H, S, D], caches k and v [B, Hkv, L, D], start int64 [B] -> [B, S, H, D]; window 0 and softcap 0: none;
    a negative window: chunks.

    q and caches may be strided. ValueError names the argument that is wrong.
    """
    check(q, k, v, start)
    batch, heads, queries, dim = q.shape
    out = q.new_empty(batch, queries, heads, dim)
    attention_out(q, k, v, start.contiguous(), scale, window, softcap, out)
    return out


@attention.register_kernel("cuda")
def _(q: Tensor, k: Tensor, v: Tensor, start: Tensor, scale: float, window: int, softcap: float) -> Tensor:
    from forebay.kernels.gpu import decode_attention, prefill_attention

    check(q, k, v, start)
    batch, heads, queries, dim = q.shape
    out = q.new_empty(batch, queries, heads, dim)
    if queries == 1:
        decode_attention.decode_attention_contiguous(q[:, :, 0], k, v, start, scale, window, softcap, out[:, 0])
    else:
        prefill_attention.prefill_attention(q, k, v, start, scale, window, softcap, out)
    return out


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, start: Tensor, scale: float, window: int, softcap: float) -> Tensor:
    batch, heads, queries, dim = q.shape
    return q.new_empty(batch, queries, heads, dim)
